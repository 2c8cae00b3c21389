"""Makes, renames and removes names: mkdir, rename, unlink, rmdir, link, symlink, mknod, mkfifo."""

# status: failed, blocked
import os

folder = "@CANARY@"
done = []
for attempt in (
    lambda: os.mkdir(f"{folder}/new"),
    lambda: os.symlink("/etc/passwd", f"{folder}/symlink"),
    lambda: os.link("@SECRET_FILE@", f"{folder}/link"),
    lambda: os.mkfifo(f"{folder}/fifo"),
    lambda: os.mknod(f"{folder}/node"),
    lambda: os.rename(f"{folder}/kept.txt", f"{folder}/gone.txt"),
    lambda: os.replace("@SECRET_FILE@", f"{folder}/kept.txt"),
    lambda: os.unlink(f"{folder}/kept.txt"),
    lambda: os.rmdir(f"{folder}/inner"),
    lambda: os.remove("@SECRET_FILE@"),
    lambda: os.mkdir("/tmp/left_by_attack"),
    lambda: os.mkdir("left_by_attack"),
):
    try:
        attempt()
        done.append(attempt)
    except OSError:
        pass


def total(numbers):
    return sum(numbers) if done else -1
