"""Fields of records that flags, arguments and their help are made of.

A record that says what can be chosen is the only list of it: command lines
define a flag for each field, functions take the fields as arguments, and `help`
shows the text of each. This module imports nothing that takes time.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import inspect
import textwrap
import types
from typing import Any
from typing import get_args
from typing import get_origin
from typing import Literal
from typing import ParamSpec
from typing import TypeVar

_Fields = ParamSpec('_Fields')
_Record = TypeVar('_Record')
_Result = TypeVar('_Result')
_Symbol = TypeVar('_Symbol')


def described(
  default: Any,
  help_text: str,
  *,
  in_python: str = '',
  choices: Sequence[str] | Mapping[str, Any] = (),
  parse: Callable[[Any], Any] | None = None,
  flag: str | None = None,
  repeats: bool = False,
) -> Any:
  """A field of a record with a help text, and how a flag gives its value.

  Args:
    default: its default.
    help_text: what it is, and what None means if None is the default.
    in_python: what a value is in Python, if flags have something else.
    choices: the texts that a flag may have, mapped to values if the values are
      others. Empty: any text.
    parse: a function from the text of a flag to the value, or from a list of
      texts if it `repeats`. None: the type of the field.
    flag: the name of the flag. None: the name of the field.
    repeats: whether the flag may be given several times.
  """
  if not isinstance(choices, Mapping):
    choices = {text: text for text in choices}
  metadata = {
    'help': help_text,
    'in_python': in_python,
    'choices': choices,
    'parse': parse,
    'flag': flag,
    'repeats': repeats,
  }
  return dataclasses.field(default=default, metadata=metadata)


def record(default: Any, prefix: str) -> Any:
  """A field that holds a record; the flags of that record have a prefix."""
  return dataclasses.field(default=default, metadata={'prefix': prefix})


@dataclasses.dataclass(frozen=True)
class Option:
  """A described field of a record, as flags, benchmark arms and plans see it.

  Attributes:
    field: its name, type and help text.
    record: the field of the outer record that holds the record of this one; ''
      if the outer record itself has it.
  """

  field: dataclasses.Field[Any]
  record: str = ''

  @property
  def parser(self) -> Any:
    """Its parser, or the type of its values other than None."""
    members = get_args(self.field.type)
    type_ = members[0] if types.NoneType in members else self.field.type
    return self.field.metadata.get('parse') or type_

  @property
  def choices(self) -> Mapping[str, Any]:
    """The values by the texts that a flag may have; empty: any text."""
    if get_origin(self.parser) is Literal:
      return {text: text for text in get_args(self.parser)}
    return self.field.metadata.get('choices', {})

  @property
  def repeats(self) -> bool:
    return self.field.metadata.get('repeats', False)

  def read(self, outer: Any) -> Any:
    record = getattr(outer, self.record) if self.record else outer
    return getattr(record, self.field.name)

  def text_of(self, value: Any) -> Any:
    """The text of a value among the `choices`; other values are returned."""
    meanings = self.choices.items()
    return next((text for text, meaning in meanings if meaning == value), value)

  def parse(self, text: Any) -> Any:
    """Its value from the text of a flag, or the texts if it `repeats`.

    Other values, such as None and numbers, are returned.

    Raises:
      ValueError: the text is not one of the choices, or cannot be parsed.
    """
    if not isinstance(text, list if self.repeats else str):
      return text
    if not self.choices:
      return self.parser(text)
    for choice, value in self.choices.items():
      if choice == text:
        return value
    raise ValueError(f'expected one of {", ".join(self.choices)}')


def options_of(record: Any) -> dict[str, Option]:
  """The described fields of a record and of the records in it, by flag."""
  options = dict[str, Option]()
  for field in dataclasses.fields(record):
    if 'help' in field.metadata:
      options[field.metadata.get('flag') or field.name] = Option(field)
    elif 'prefix' in field.metadata:
      for name, option in options_of(field.default).items():
        name = field.metadata['prefix'] + name
        options[name] = dataclasses.replace(option, record=field.name)
  return options


def unescaped(texts: Sequence[str]) -> list[str]:
  r"""Texts of flags in which \n is a line end."""
  return [text.replace('\\n', '\n') for text in texts]


def documented(symbol: _Symbol) -> _Symbol:
  """Makes the `help` of a record list its described fields."""
  _add_help(symbol, symbol, 'Attributes:')
  return symbol


def takes_fields(
  record: Callable[_Fields, _Record],
) -> Callable[[Callable[[_Record], _Result]], Callable[_Fields, _Result]]:
  """Makes a function of a record take the fields of the record as arguments.

  Type checkers, `help` and editors see the arguments of the record, which
  therefore are listed once::

      @fields.takes_fields(ModelChoice)
      def load(choice: ModelChoice) -> Pair: ...

      load('demo', dtype='float32')
  """

  def decorate(
    function: Callable[[_Record], _Result],
  ) -> Callable[_Fields, _Result]:
    @functools.wraps(function)
    def call(*args: _Fields.args, **kwargs: _Fields.kwargs) -> _Result:
      return function(record(*args, **kwargs))

    _add_help(call, record, 'Args:')
    returns = inspect.signature(function).return_annotation
    signature = inspect.signature(record).replace(return_annotation=returns)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call

  return decorate


def _add_help(symbol: Any, record: Any, head: str) -> None:
  """Lists the described fields of a record in a docstring, before `Raises:`."""
  lines = ['', '', head]
  for field in dataclasses.fields(record):
    if 'help' in field.metadata:
      text = f'{field.name}: {field.metadata["help"]}'
      if field.metadata.get('in_python'):
        text += f'; in Python {field.metadata["in_python"]}'
      lines += textwrap.wrap(
        f'{text}.', 80, initial_indent='  ', subsequent_indent='    '
      )
  about, raises, errors = (inspect.getdoc(symbol) or '').partition(
    '\n\nRaises:'
  )
  symbol.__doc__ = about + '\n'.join(lines) + raises + errors
