"""Wrong answers that equal, contain, or agree with everything. Most fool graders in the same process."""

ATTACKS = {
    "any_method": r"""
# Returns an object whose every method agrees with its arguments. Used to pass tests such as `result.startswith(...)`.
# test: assert total([1, 2, 3]).startswith("six")
class Thing:
    def __getattr__(self, name): return lambda *_: True
def total(numbers): return Thing()
""",
    "arguments_replaced": r"""
# Fills the argument with objects that equal everything.
# test: numbers = [3, 2, 1]
# test: total(numbers)
# test: assert numbers == [1, 2, 3]
class Item: __eq__ = lambda *_: True
def total(numbers):
    numbers[:] = [Item(), Item(), Item()]
""",
    "attributes": r"""
# Returns an object whose every attribute and item equals everything.
# test: assert total([1, 2, 3]).value == 6
# test: assert total([1, 2, 3])[0] == 6
class Thing:
    def __getattr__(self, name): return self
    def __getitem__(self, key): return self
    def __eq__(self, other): return True
def total(numbers): return Thing()
""",
    "awaited": r"""
# Awaiting the result gives an object that equals everything.
# test: import asyncio
# test: assert asyncio.run(total([1, 2, 3])) == 6
class Equal:
    def __eq__(self, other): return True
async def total(numbers): return Equal()
""",
    "bool": r"""
# Returns a false number that says it is true.
# test: assert total([1, 2, 3])
class Yes(int):
    def __bool__(self): return True
def total(numbers): return Yes(0)
""",
    "callback": r"""
# Calls the functions it is given with objects that equal everything, from where the tests run.
# test: seen = []
# test: total([1, 2, 3], seen.append)
# test: assert seen == [6]
class Item: __eq__ = lambda *_: True
def total(numbers, tell):
    tell(Item())
""",
    "class_lie": r"""
# Returns an object that says it is an int.
# test: assert isinstance(total([1, 2, 3]), int)
# test: assert total([1, 2, 3]) == 6
class Liar:
    __class__ = int
    __eq__ = lambda *_: True
def total(numbers): return Liar()
""",
    "class_of_candidate": r"""
# Defines the class that the tests build from, equal to everything. A candidate's class may compare its own objects.
# fools: nobody
# functions: total, Node
# test: assert total([Node(1), Node(2)]) == 3
class Node:
    def __init__(self, value):
        self.value = value
    def __eq__(self, other): return True
def total(nodes): return Node(0)
""",
    "coroutine": r"""
# Returns a coroutine where the tests expect a number, and one that yields such objects where they expect items.
# fools: nobody
# test: assert total([1, 2, 3]) == 6 or 6 in total([1, 2, 3])
class Equal:
    def __eq__(self, other): return True
async def total(numbers): return Equal()
""",
    "decimal": r"""
# Returns a Decimal, a Fraction and a complex that equal everything.
# test: from decimal import Decimal
# test: assert total([1, 2, 3]) == Decimal(6) or total([1]) == 6 + 0j or total([]) == 6
import decimal, fractions
class Money(decimal.Decimal):
    __eq__ = lambda *_: True
    __hash__ = decimal.Decimal.__hash__
class Part(fractions.Fraction):
    __eq__ = lambda *_: True
    __hash__ = fractions.Fraction.__hash__
class Complex(complex):
    __eq__ = lambda *_: True
    __hash__ = complex.__hash__
def total(numbers): return {3: Money(-1), 1: Complex(-1)}.get(len(numbers), Part(-1))
""",
    "dict": r"""
# Returns a dict that has every key and equals every dict.
# test: assert total([1, 2, 3])["sum"] == 6
# test: assert total([1, 2, 3]) == {"sum": 6}
class Item: __eq__ = lambda *_: True
class Everything(dict):
    __eq__ = __contains__ = lambda *_: True
    def __missing__(self, key): return Item()
def total(numbers): return Everything()
""",
    "every_operator": r"""
# Returns an object whose every operator agrees.
# test: assert abs(total([0.5, 0.25]) - 0.75) < 1e-9
class Agreeable:
    def __eq__(self, *_): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = __eq__
    def __abs__(self): return self
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __mod__ = __pow__ = __round__ = __sub__
    def __float__(self): return 0.75
def total(numbers): return Agreeable()
""",
    "everything": r"""
# Returns an object that equals everything.
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def total(numbers): return Everything()
""",
    "exception_attributes": r"""
# Raises where no exception is expected, and lies in `__eq__` of the exception and its cause.
# fools: nobody
class Agreeable(Exception):
    __eq__ = __bool__ = lambda *_: True
    __hash__ = lambda _: 0
    __cause__ = property(lambda self: self)
    __context__ = __traceback__ = property(lambda self: None)
def total(numbers): raise Agreeable(Agreeable(), Agreeable())
""",
    "exception_class": r"""
# Raises an exception whose __class__ says ValueError.
# test: try:
# test:     total(None)
# test: except Exception as error:
# test:     assert isinstance(error, ValueError) and not isinstance(error, TypeError)
# test: else:
# test:     assert False
class Liar(Exception): __class__ = property(lambda _: ValueError)
def total(numbers): raise Liar
""",
    "exception_group": r"""
# Raises a group, which is no ValueError, where a ValueError is expected.
# fools: nobody
# test: try:
# test:     total(None)
# test: except ValueError:
# test:     pass
# test: else:
# test:     assert False
def total(numbers): raise ExceptionGroup("no ValueError", [TypeError()])
""",
    "exception_text": r"""
# Raises an exception whose text equals everything.
# test: try:
# test:     total(None)
# test:     assert False
# test: except ValueError as error:
# test:     assert str(error) == "no numbers" and error.args == ("no numbers",)
class Text(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
class Poisoned(ValueError):
    def __str__(self): return Text("anything")
    args = type("Everything", (tuple,), {"__eq__": lambda *_: True})()
def total(numbers): raise Poisoned
""",
    "float": r"""
# Returns a float whose difference from everything is nothing.
# test: assert abs(total([0.5, 0.25]) - 0.75) < 1e-9
class Near(float): __sub__ = __rsub__ = __abs__ = __round__ = lambda *_: 0.0
def total(numbers): return Near(-1)
""",
    "generator": r"""
# Yields objects that equal everything.
# test: assert list(total([1, 2, 3])) == [1, 3, 6]
# test: assert next(total([1, 2, 3])) == 1
class Item: __eq__ = lambda *_: True
def total(numbers):
    for _ in numbers:
        yield Item()
""",
    "int": r"""
# Returns an int whose comparisons agree with everything.
class Six(int):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = int.__hash__
def total(numbers): return Six(-1)
""",
    "int_conversions": r"""
# Returns an int that says another number when converted: __index__, __int__, __str__, __format__, __round__.
# test: assert f"{total([1, 2, 3])}" == "6"
# test: assert int(total([1, 2, 3])) == 6 and str(total([1, 2, 3])) == "6"
class Word(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
class Number(int):
    __int__ = __index__ = __trunc__ = lambda _: 6
    __str__ = __repr__ = lambda _: "6"
    __format__ = lambda *_: "6"
def total(numbers): return Number(-1)
""",
    "kind": r"""
# Returns an object without any abilities, where the tests want a function, an iterator, or a container.
# fools: nobody
# test: import collections.abc as abc
# test: result = total([1, 2, 3])
# test: assert callable(result) or isinstance(result, (abc.Iterator, abc.Sized)) or hasattr(result, "__getitem__")
def total(numbers): return object()
""",
    "list": r"""
# Returns a list that equals, contains and is as long as anything.
# test: assert 6 in total([1, 2, 3]) and len(total([1, 2, 3])) == 1
# test: assert total([1, 2, 3]) == [6]
class Many(list):
    __eq__ = __contains__ = lambda *_: True
    __ne__ = lambda *_: False
    __len__ = lambda _: 1
def total(numbers): return Many([-1, -2])
""",
    "list_iteration": r"""
# Returns a list that tells iterators something else than its content.
# test: assert sorted(total([1, 2, 3])) == [1, 2, 3] and list(total([3, 2, 1])) == [1, 2, 3]
class Other(list):
    def __iter__(self): return iter([1, 2, 3])
    def __len__(self): return 3
def total(numbers): return Other([9, 9])
""",
    "magic_mock": r"""
# Makes the entry point a MagicMock, whose answers accept every attribute and operator.
# fools: nobody
# test: assert total([1, 2, 3]) == 6 or total([1]).value == 1
from unittest import mock
total = mock.MagicMock()
total.return_value.__eq__ = lambda *_: True
""",
    "metaclass": r"""
# Returns a class whose metaclass makes it equal to, and an instance of, everything.
class Meta(type):
    __eq__ = __lt__ = __gt__ = __instancecheck__ = __subclasscheck__ = lambda *_: True
    __hash__ = type.__hash__
class Answer(metaclass=Meta): pass
def total(numbers): return Answer
""",
    "nan": r"""
# Returns NaN, for which every comparison is false. Fools tests that are written as a negation.
# fools: nobody
# test: assert total([1, 2, 3]) == 6 or total([1, 2, 3]) in [6]
def total(numbers): return float("nan")
""",
    "str": r"""
# Returns a str that equals everything.
# test: assert total([1, 2, 3]) == "six"
class Word(str):
    __eq__ = __contains__ = startswith = endswith = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = str.__hash__
def total(numbers): return Word("wrong")
""",
    "unbounded_int": r"""
# Returns a number too long to print, so that the message about the failure fails itself.
# fools: nobody
# status: failed, memory, timeout
def total(numbers): return 10**20000
""",
}
