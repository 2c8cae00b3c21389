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
    """The method, without an instance."""
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
            if parameter.kind is parameter.VAR_POSITIONAL:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = "allow"
                continue
            if parameter.default is parameter.empty:
                field = Field(alias=parameter.name)
            else:
                field = Field(None, alias=parameter.name)
            # Fields have made names, because an argument may have the name of one of pydantic's methods.
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
            validated = self.arguments.model_validate_json(text, strict=True)
        except ValidationError as errors:
            raise WrongArguments(_problem(errors)) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise WrongArguments(f"arguments are not JSON: {error}") from None

        # Only what the model gave: the method's own defaults take the place of the rest.
        values = dict(validated.model_extra or {})
        for field, info in type(validated).model_fields.items():
            if field in validated.model_fields_set:
                values[str(info.alias)] = getattr(validated, field)
        return self.function(environment, **values)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema as chat templates take it.

        Raises:
            PydanticUserError: JSON has no value of an argument's type.
            TypeHintParsingException: an argument has no type.
            DocstringParsingException: an argument has no description.
        """
        from transformers.utils import get_json_schema

        hints = typing.get_type_hints(self.function)
        by_pydantic = [name for name, hint in hints.items() if name != "return" and not _is_json_type(hint)]
        # transformers cannot describe a generic type that JSON lacks, and templates do not show the type of a result.
        returned = hints.get("return", Any)
        is_generic = typing.get_origin(returned) is not None
        if is_generic and not _is_json_type(returned):
            del hints["return"]

        # transformers describes a stand-in whose arguments of other types are `Any`.
        def stand_in(environment: Any) -> None:
            """Has the signature and docstring of the method."""

        stand_in.__name__ = self.name
        stand_in.__doc__ = self.function.__doc__
        stand_in.__signature__ = inspect.signature(self.function)  # type: ignore[attr-defined]
        stand_in.__annotations__ = hints | dict.fromkeys(by_pydantic, Any)
        schema = get_json_schema(types.MethodType(stand_in, object()))

        # pydantic describes those types. The descriptions of the arguments are transformers', from the docstring.
        properties = schema["function"]["parameters"]["properties"]
        fields = {field.alias: field for field in self.arguments.model_fields.values()}
        for name in by_pydantic:
            annotation: Any = fields[name].annotation
            if fields[name].metadata:
                annotation = typing.Annotated[(annotation, *fields[name].metadata)]
            described = TypeAdapter(annotation).json_schema()
            properties[name] = _inlined(described, described.get("$defs", {})) | properties[name]
        return dict(schema)


def _problem(errors: ValidationError) -> str:
    """Return what is wrong with the first argument that pydantic refuses."""
    error = errors.errors()[0]
    if not error["loc"]:
        return f"arguments: {error['msg']}"
    argument, *path = error["loc"]
    position = f"argument {argument!r:.60}"
    if path:  # to a part of the argument, or one of the types that it may have
        position += f" ({'.'.join(map(str, path)):.60})"
    return f"{position}: {error['msg']}"


def _is_json_type(hint: Any) -> bool:
    """Return whether transformers describes a type as JSON has it."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin is None:
        return hint in _JSON_TYPES
    if origin is typing.Literal:
        # With a member of an Enum, transformers refuses it, which is right: pydantic would refuse every call.
        return True
    if origin is dict:
        return parts[0] in (str, Any) and _is_json_type(parts[1])
    if origin is tuple and len(parts) == 1:
        return False
    if origin in (list, tuple, typing.Union, types.UnionType):
        return ... not in parts and all(_is_json_type(part) for part in parts)
    return False


def _inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return a JSON schema without titles and with definitions in the place of references, for chat templates.

    Args:
        definitions: the schemas that references name.
        within: names of the definitions that contain this schema.
    """
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
