"""Changes the times of files, which Landlock does not cover: of the canary, and of the standard library's own."""

# status: failed, blocked
import os

done = []
opened = os.open(os.__file__, os.O_RDONLY)
for target in ("@CANARY@/kept.txt", "@CANARY@", "@SECRET_FILE@", os.__file__, opened):
    try:
        found = os.stat(target)
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        done.append(target)
    except OSError:
        pass


def total(numbers):
    return sum(numbers) if done else -1
