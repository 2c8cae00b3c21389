"""Durations as text."""


def duration(seconds: float) -> str:
    """Format a duration: 41 s, 2 min 51 s or 1 h 48 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
