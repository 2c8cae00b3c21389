"""Returns a tuple of pairs of pairs, which takes no room here and 2^60 places written out (a billion laughs)."""


# status: failed, memory, timeout
def total(numbers):
    result = (6,)
    for _ in range(60):
        result = (result, result)
    return result
