"""What every JSON section has in common: strict types, and one line for whatever is wrong with it.

Knows no key; :mod:`ds_moe_lb.config` has them.
"""

import difflib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

# Values in messages: one line, and no more of it than helps.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80

Path = tuple[str | int, ...]


class Section(BaseModel):
    """Keys with strict types; others are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


AnySection = TypeVar("AnySection", bound=Section)


class SectionReader:
    """Validates the content of one section, and says in one line each what is wrong with it.

    Args:
        name: of the section in the DeepSpeed JSON.
        model: its keys.
        example: a JSON object, for somebody who gave none.
        expected: by key, what is allowed where the type alone does not say it.
        model_at: the keys of a part of the section; by default there are no parts.
    """

    def __init__(
        self,
        name: str,
        model: type[Section],
        *,
        example: str,
        expected: Mapping[str, str],
        model_at: Callable[[Path], type[Section]] | None = None,
    ) -> None:
        self._name = name
        self._example = example
        self._expected_of = expected
        self._model_at = model_at or (lambda path: model)

    def read(self, model: type[AnySection], section: Any) -> AnySection:
        """Build the section's model; ValueError naming section, key, value and what is allowed."""
        if not isinstance(section, Mapping):
            raise ValueError(
                f"{self._name}: got {_brief.repr(section)}, expected an object such as "
                f"{self._example}"
            )
        for key in section:  # a dict handed over in Python may have other keys than JSON's strings
            if not isinstance(key, str):
                raise ValueError(
                    f"{self._name}: got the key {_brief.repr(key)}, expected one of "
                    f"{self._allowed_keys(())}"
                )
        try:
            return model(**section)
        except ValidationError as error:
            raise ValueError("\n".join(self._explain(item) for item in error.errors())) from None

    def _allowed_keys(self, path: Path) -> str:
        return ", ".join(repr(name) for name in self._model_at(path).model_fields)

    def _explain(self, item: Any) -> str:
        """One pydantic error as one line: section.key: got value, expected what."""
        path: Path = item["loc"]
        where = ".".join([self._name, *map(_readable, path)])
        if item["type"] == "extra_forbidden":
            fields = list(self._model_at(path[:-1]).model_fields)
            nearest = difflib.get_close_matches(str(path[-1]), fields, n=1, cutoff=0.5)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            return f"{where}: unknown key.{hint} Allowed keys: {self._allowed_keys(path[:-1])}"
        return f"{where}: got {_brief.repr(item['input'])}, expected {self._expected(path, item)}"

    def _expected(self, path: Path, item: Any) -> str:
        if item["type"] == "literal_error":
            is_inside = self._model_at(path) is not self._model_at(())
            field = self._model_at(path).model_fields[str(path[-1] if is_inside else path[0])]
            choices = [repr(choice) for choice in get_args(field.annotation)]
            nearest = difflib.get_close_matches(str(item["input"]), get_args(field.annotation), n=1)
            hint = f" (nearest: {nearest[0]!r})" if nearest else ""
            return f"one of {', '.join(choices)}{hint}"
        if len(path) == 1 and path[0] in self._expected_of:
            return self._expected_of[str(path[0])]
        expected = {
            "float_type": "a finite number >= 0",
            "finite_number": "a finite number >= 0",
            "int_type": "an integer",
            "bool_type": "true or false",
            "list_type": "a list of objects",
            "missing": "the key 'step', an integer",
            "dict_type": "an object",
            "model_type": f"an object with the keys {self._allowed_keys(path)}",
            "model_attributes_type": f"an object with the keys {self._allowed_keys(path)}",
        }
        if item["type"] == "greater_than_equal":
            return f"a number >= {item['ctx']['ge']:g}"
        return expected.get(item["type"], item["msg"])


def _readable(key: str | int) -> str:
    """A key as it is, or quoted where it would break the line or could not be printed."""
    return str(key) if isinstance(key, int) or key.isidentifier() else ascii(key)


def refuse_misspelt(
    ds_config: Mapping[str, Any], section: str, *, is_meant: Callable[[str], bool]
) -> None:
    """Raise ValueError for a top-level key that looks like a misspelt name of the section.

    Args:
        ds_config: the whole DeepSpeed JSON, which lacks the section.
        section: its name.
        is_meant: whether a key, in lower case and with underscores, means it for another reason
            than that it is spelt alike.
    """
    for key in ds_config:
        if not isinstance(key, str):
            continue
        folded = key.lower().replace("-", "_")
        close = difflib.SequenceMatcher(None, folded, section).ratio() >= 0.75
        if close or is_meant(folded):
            raise ValueError(
                f"DeepSpeed config: the section {key!r} is unknown; did you mean {section!r}? "
                f"DeepSpeed itself would ignore it in silence."
            )
