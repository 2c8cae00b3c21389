"""Returns a tuple nested nine hundred deep, just below the recursion limit, and dicts as deep."""


# status: failed, crashed
def total(numbers):
    result = ()
    for _ in range(900):
        result = ({1: result},)
    return result
