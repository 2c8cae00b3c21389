"""Returns a list that contains itself."""


# status: failed, crashed
def total(numbers):
    result = [6]
    result.append(result)
    return result
