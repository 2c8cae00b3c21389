"""Returns short numbers that are huge once converted: Decimal('1e999999999'), Fractions, complex infinities."""

# status: failed, timeout, memory
# test: assert int(total([1, 2, 3])) == 6
import decimal


def total(numbers):
    return decimal.Decimal("1e99999999")
