"""Changes owners and permissions, which Landlock does not cover: chmod, chown, by path and by descriptor."""

# status: failed, blocked
import os
import stat

done = []
opened = os.open(os.__file__, os.O_RDONLY)
for target in ("@CANARY@/kept.txt", "@SECRET_FILE@", "@CANARY@", "/tmp", "/", os.__file__, opened):
    for attempt in (
        lambda target: os.chmod(target, stat.S_IMODE(os.stat(target).st_mode)),
        lambda target: os.chmod(target, 0o755 if "canary" in str(target) else stat.S_IMODE(os.stat(target).st_mode)),
        lambda target: os.chown(target, -1, -1),
        lambda target: os.lchown(target, -1, -1),
    ):
        try:
            attempt(target)
            done.append(target)
        except (OSError, TypeError):
            pass


def total(numbers):
    return sum(numbers) if done else -1
