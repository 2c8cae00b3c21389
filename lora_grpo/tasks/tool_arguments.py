"""The tools of an environment: their JSON schemas, which the model reads, and the types that their arguments must have.

The model writes JSON, so arguments are validated as pydantic validates JSON: strictly (the text "1" is no integer), but
a date, a tuple or an Enum is what JSON can hold of it. For arguments with the types that JSON has, the schema is TRL's
(transformers' `get_json_schema`); it calls any other type an object, for which pydantic's schema is used.
"""

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

_JSON_TYPES = (int, float, str, bool, type(None), dict, Any)


class WrongArguments(ValueError):
    """The arguments of a call do not have the types of the tool."""


@dataclass(frozen=True)
class Tool:
    """A method of an environment's class that the model can call."""

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    """Has a field for each argument, whose alias is the argument's name."""

    @classmethod
    def of(cls, name: str, function: Callable[..., Any]) -> "Tool":
        """Return the tool of a method.

        Raises:
            PydanticUserError: an argument has a type that pydantic cannot validate.
            NameError: a type is not defined.
        """
        hints = typing.get_type_hints(function, include_extras=True)
        _, *parameters = inspect.signature(function).parameters.values()  # without `self`
        extra: typing.Literal["allow", "forbid"] = "forbid"
        fields: dict[str, Any] = {}
        for number, parameter in enumerate(parameters):
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = "allow"
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                is_required = parameter.default is parameter.empty
                field = Field(alias=parameter.name) if is_required else Field(None, alias=parameter.name)
                # Names of its own, because those of arguments may be names of pydantic's methods.
                fields[f"argument_{number}"] = (hints.get(parameter.name, Any), field)
        config = ConfigDict(strict=True, allow_inf_nan=False, extra=extra)
        return cls(name, function, create_model(name, __config__=config, **fields))

    def __call__(self, environment: Any, /, **arguments: Any) -> Any:
        """Call the method of an environment with arguments as they are in JSON.

        Raises:
            WrongArguments: an argument is missing, unknown, or of another type.
        """
        try:
            text = json.dumps(arguments, allow_nan=False)  # NaN would be neither too low nor too high
            values = self.arguments.model_validate_json(text, strict=True)
        except ValidationError as errors:
            error = errors.errors()[0]
            place = f"argument {error['loc'][0]!r:.60}" if error["loc"] else "arguments"
            if within := error["loc"][1:]:  # a part of the argument, or one of the types that it may have
                place += f" ({'.'.join(map(str, within)):.60})"
            raise WrongArguments(f"{place}: {error['msg']}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise WrongArguments(f"arguments are not JSON: {error}") from None
        fields = type(values).model_fields
        # The method's own defaults take the place of what is not given.
        given = {str(fields[name].alias): getattr(values, name) for name in values.model_fields_set & fields.keys()}
        return self.function(environment, **given, **(values.model_extra or {}))

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema as chat templates take it.

        Raises:
            PydanticUserError: JSON has no value of an argument's type.
            TypeHintParsingException: an argument has no type.
            DocstringParsingException: an argument has no description.
        """
        from transformers.utils import get_json_schema

        hints = typing.get_type_hints(self.function)
        others = {name: hint for name, hint in hints.items() if name != "return" and not _is_json_type(hint)}
        if not _is_json_type(hints.get("return", Any)) and typing.get_origin(hints["return"]):
            del hints["return"]  # transformers cannot describe it, and templates do not show it

        def described(environment: Any) -> None:
            """A stand-in with the signature and docstring of the method, and Any for the types of `others`."""

        described.__name__, described.__doc__ = self.name, self.function.__doc__
        described.__signature__ = inspect.signature(self.function)  # type: ignore[attr-defined]
        described.__annotations__ = hints | dict.fromkeys(others, Any)
        schema = get_json_schema(types.MethodType(described, object()))
        properties = schema["function"]["parameters"]["properties"]
        for name in others:
            field = next(field for field in self.arguments.model_fields.values() if field.alias == name)
            annotation: Any = (
                typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            )
            whole = TypeAdapter(annotation).json_schema()
            properties[name] = _inlined(whole, whole.get("$defs", {})) | properties[name]
        return dict(schema)


def _is_json_type(hint: Any) -> bool:
    """Return whether transformers describes a type as JSON has it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return hint in _JSON_TYPES
    if origin is typing.Literal:  # of an Enum's member, transformers refuses it, and pydantic would in each call
        return True
    if origin is dict:
        return parts[0] in (str, Any) and _is_json_type(parts[1])
    if origin in (list, tuple, typing.Union, types.UnionType):
        return ... not in parts and all(map(_is_json_type, parts)) and (origin is not tuple or len(parts) > 1)
    return False


def _inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return a JSON schema without titles and with definitions in the place of references, for chat templates."""
    if isinstance(schema, list):
        return [_inlined(part, definitions, within) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within:  # a type that contains itself
            return {"type": "object"}
        return _inlined(definitions[name], definitions, (*within, name))
    inlined = {}
    for key, value in schema.items():
        if key == "properties":
            inlined[key] = {name: _inlined(part, definitions, within) for name, part in value.items()}
        elif key in ("default", "enum", "const"):
            inlined[key] = value
        elif key not in ("title", "$defs"):
            inlined[key] = _inlined(value, definitions, within)
    return inlined
