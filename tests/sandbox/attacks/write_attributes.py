"""Sets extended attributes and file flags, which Landlock does not cover: setxattr, removexattr, FS_IOC_SETFLAGS."""

# status: failed, blocked
import fcntl
import os

done = []
opened = os.open(os.__file__, os.O_RDONLY)
for target in ("@CANARY@/kept.txt", "@SECRET_FILE@", os.__file__, opened):
    for name in ("user.attack", "trusted.attack", "security.attack"):
        try:
            os.setxattr(target, name, b"1")
            done.append(target)
            os.removexattr(target, name)
        except OSError:
            pass
try:
    flags = fcntl.ioctl(opened, 0x80086601, b"\0" * 8)
    fcntl.ioctl(opened, 0x40086602, flags)
    done.append("flags")
except OSError:
    pass


def total(numbers):
    return sum(numbers) if done else -1
