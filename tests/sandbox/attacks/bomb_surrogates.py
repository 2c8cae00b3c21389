"""Returns texts that no encoding takes: lone surrogates, null characters, in keys and exceptions too."""


# status: failed
def total(numbers):
    if not numbers:
        raise ValueError("\ud800\x00\udfff")
    return {"\ud800": "\udfff\x00", "\x00": ["\ud83d"]}
