"""Read tables, and decide once which of their columns are numbers and which are texts.

Cells of CSV files are read as text, and converted by the same rules in training and prediction. What pandas would infer
depends on all cells of a column, so a column could be read in one way in training, and in another from a new file.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from lightning.pytorch.utilities import rank_zero_warn
from pandas.api import types

from boltcutter.data.files import MAX_EXPANSION, ExpansionError, expansion_limit, ordinary, read_gzip

Floats = npt.NDArray[np.float64]
Type = Literal["number", "text"]
LONG_LINE = re.compile(r"Expected ([0-9]+) fields in line ([0-9]+), saw ([0-9]+)")  # of pandas
SEPARATORS = ",;\t|"
BYTE_ORDER_MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\0\0": "utf-32",  # which begins as the next does
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    b"\0\0\xfe\xff": "utf-32",
}
SEPARATOR_LINE = re.compile('"?sep=(.)"?', re.IGNORECASE)  # the first line of files for Excel, before the header
# Texts that stand for a missing number; in a column of texts, all but the empty one are texts like others.
MISSING = {"", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "none", "?", "-"}
FLAGS = {"true": "True", "false": "False"}
UNNAMED = re.compile(r"(Unnamed: 0(\.[0-9]+)*)?")
ROW_NUMBER = re.compile("0|[1-9][0-9]*")
LONG_INTEGER = re.compile("[-+]?[0-9]{16,308}")  # of which floating-point numbers of 64 bits do not have all
CODE = re.compile("0[0-9]+")  # such as 01234: as a number, it would lose its zeros
MONTH = (
    r"(jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?|"
    r"dec(ember)?)\.?"
)
DATE = re.compile(  # or a time of day, or a month
    r"[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}([ T].*)?|[0-9]{1,2}:[0-9]{2}(([:.][0-9]+.*)?|\s?[ap]\.?m\.?)|"
    r"(19|20)[0-9]{2}[- ]?(W(0[1-9]|[1-4][0-9]|5[0-3])(-[1-7])?|Q[1-4])|Q[1-4][- /]?(19|20)[0-9]{2}|"
    rf"[0-9]{{1,4}}[-/. ]?{MONTH}([-/. ,]+[0-9]{{1,4}}(,? .*)?)?|{MONTH}[-/. ]?[0-9]{{1,4}}(,? [0-9]{{4}}(,? .*)?)?|"
    r"(19|20)[0-9]{2}[-/](0[1-9]|1[0-2])",
    re.IGNORECASE,
)
COMPACT_DATE = re.compile(r"(19|20)[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])")
CURRENCY = "[$\u00a3\u00a5\u0e3f\u20a0-\u20c0]"
# A number that is written for people: decimal commas, thousands, percent, currencies, dashes in place of a minus, and
# digits of other scripts.
WRITTEN = re.compile(
    rf"[-+\u2212\u2013\u2014(]?\s?{CURRENCY}?\s?\d+(?:[.,'\u2019\s\u00a0\u202f\u2009\u066b\u066c]\d+)*[.,]?"
    rf"(?:[eE][-+]?[0-9]+)?\s?(?:[-%\u2030)]|{CURRENCY})?"
)
# A number with a unit or the code of a currency. All values must have the same: 12A and 7B are names of something.
UNIT = re.compile(
    r"(?:(?P<code>EUR|USD|GBP|CHF|JPY)\s?)?[-+]?[0-9][0-9.,'\u2019]*\s?(?P<unit>[^\W\d_]{1,5}|\u00b0[CF]|/[a-z]+)?"
)
NUMERAL = r"[-+]?[0-9]+(?:[.,][0-9]+)?"
UNITS = (
    r"ms|s|secs?|seconds?|min|mins|minutes?|h|hrs?|hours?|d|days?|w|weeks?|months?|yrs?|years?|"
    r"mg|g|kg|t|oz|lbs?|mm|cm|m|km|in|ft|mi|ml|l|[kmgt]i?b|[kmgt]|bn"
)
# Numbers in quotes, with characters of no width, in hexadecimal, in powers of ten, and with units that differ.
DISGUISED = re.compile(
    rf"[='\"`\u200b-\u200d\u2060\ufeff]*{NUMERAL}['\"`\u200b-\u200d\u2060\ufeff]*|0x[0-9a-f]+|"
    rf"{NUMERAL}(?:\s?[\u00d7x*\u00b7]\s?10\s?\^?\s?|d)[-+\u2212]?[0-9]+|(?:{NUMERAL}\s?(?:{UNITS})\s?)+|"
    r"P(?:[0-9.]+[YMWD])*(?:T(?:[0-9.]+[HMS])+)?",
    re.IGNORECASE,
)
EXAMPLES = 3
UNSEEN = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")  # soft hyphens, and characters of no width
NUMERALS = re.compile(r"\d+(?:[.,]\d+)*")
MAX_PATTERNED = 20  # different values of a column that differ only in their numerals, such as groups of ages
MAX_COLUMNS = 200_000  # of a CSV file
BATCH_ROWS = 1 << 16  # of a Parquet file


def read_table(
    path: Path, *, encoding: str | None = None, separator: str | None = None, max_expansion: float = MAX_EXPANSION
) -> pd.DataFrame:
    """Read a CSV or Parquet file with at least one row.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file.
        encoding: Encoding of a CSV file; None: by its byte order mark, else UTF-8.
        separator: Separator of a CSV file; None: comma, semicolon, tab or ``|``, by the first line.
        max_expansion: Size of the content of a compressed or Parquet file, in sizes of the file, above which it is
            refused; see ``expansion_limit``.

    Returns:
        The columns of a CSV file as text, without white space around cells; an empty cell is None. Those of a Parquet
        file have its types; an index of pandas that has a name is one of them,
        unless a column has that name.

    Raises:
        ValueError: It is no such file, or not a valid table, or two columns have the same name.
    """
    if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise ValueError(f"{path}: expected a file name that ends in .csv, .csv.gz or .parquet")
    ordinary(path, "give the path of a table")
    try:
        limit = expansion_limit(path, max_expansion)
        table = _read_parquet(path, limit) if path.suffix == ".parquet" else _read_csv(path, encoding, separator, limit)
    except ExpansionError:
        raise ValueError(
            f"{path}: has more than {limit >> 20} MiB when it is expanded, over data.max_expansion={max_expansion:g} "
            "times its size; raise it if the file is what it should be"
        ) from None
    except ImportError:  # pandas reads Parquet by pyarrow
        raise ValueError(f"{path}: pyarrow is not installed; pip install 'boltcutter[tabular]'") from None
    except UnicodeError as error:
        proposed = str(error) if type(error) is UnicodeError else "latin-1"
        raise ValueError(
            f"{path}: not a text in {encoding or 'UTF-8'}; set data.encoding, such as data.encoding={proposed}"
        ) from None
    except (ValueError, OSError, EOFError, LookupError) as error:
        if found := LONG_LINE.search(str(error)):
            header, line, count = found.groups()
            remedy = f"correct line {line}"
            if header == "1":
                remedy = "remove the lines above the header, or set data.separator"
            raise ValueError(
                f"{path}: line 1, the header, has {header} cell{'s' * (header != '1')}, but line {line} has {count}; "
                f"{remedy}"
            ) from None
        raise ValueError(f"{path}: not a valid table ({' '.join(str(error).split())}); replace it") from None
    table = table.rename(columns=str)
    if repeated := [str(name) for name in table.columns[table.columns.duplicated()]]:
        raise ValueError(f"{path}: column {repeated[0]} appears more than once; rename one of them")
    if table.empty:
        raise ValueError(f"{path}: the table has no rows; give one with rows")
    return table


def _read_parquet(path: Path, limit: int) -> pd.DataFrame:
    """Read in batches, as a file of any size may repeat one value any number of times.

    Raises:
        ExpansionError: It has more bytes than the limit, in memory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    batches, size = [], 0
    with pq.ParquetFile(path) as file:
        facts = file.metadata
        chunks = (facts.row_group(g).column(c) for g in range(facts.num_row_groups) for c in range(facts.num_columns))
        longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)  # of a value
        for batch in file.iter_batches(max(1, min(BATCH_ROWS, limit // max(1, longest)))):
            size += batch.nbytes
            if size > limit:
                raise ExpansionError
            batches.append(batch)
        found: pd.DataFrame = pa.Table.from_batches(batches, file.schema_arrow).to_pandas()
    names = found.index.names
    if named := [name for name in names if name is not None and name not in found]:  # which are columns in CSV
        found = found.reset_index(named)
    elif None in names and not types.is_integer_dtype(found.index.dtype):  # else the numbers of the rows
        rank_zero_warn(f"{path}: the index has no name, so it is left out; give it a name to use it")
    return found


def _read_csv(path: Path, encoding: str | None, separator: str | None, limit: int) -> pd.DataFrame:
    content = read_gzip(path, limit) if path.suffix == ".gz" else b""

    def source() -> Any:
        return io.BytesIO(content) if content else path

    if encoding is None:
        with path.open("rb") as file:
            begin = content[:4] or file.read(4)
        encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if begin.startswith(mark)), "utf-8")
        if encoding == "utf-8" and b"\0" in begin:  # every second byte, without a byte order mark
            proposed = "utf-16-be" if begin.startswith(b"\0") else "utf-16-le"
            raise UnicodeError(proposed)
    options: dict[str, Any] = {"header": None, "dtype": str, "na_filter": False, "encoding": encoding}
    # The header is read as a row: pandas would rename repeated names, and make an index of a column without a name.
    first = pd.read_csv(source(), sep="\x01", nrows=2, quoting=csv.QUOTE_NONE, **options)
    line = str(first.iloc[0, 0])
    if found := SEPARATOR_LINE.fullmatch(line.strip()):
        separator, line, options["skiprows"] = separator or found[1], str(first.iloc[-1, 0]), 1
    if separator is None:
        separator = max(SEPARATORS, key=lambda one: _count_cells(line, one))
    if len(separator) == 1 and (count := _count_cells(line, separator)) > MAX_COLUMNS:
        raise ValueError(f"{count:,} columns, more than {MAX_COLUMNS:,}, each of which is looked at")
    cells = pd.read_csv(source(), sep=separator, skip_blank_lines=True, **options)
    cells = pd.DataFrame({place: to_texts(cells[place]) for place in cells})
    header = ["" if name is None else name for name in cells.iloc[0]]
    table = cells.iloc[1:].reset_index(drop=True).set_axis(header, axis="columns")
    is_used = [bool(name) or bool(table.iloc[:, place].notna().any()) for place, name in enumerate(header)]
    used: pd.DataFrame = table.loc[:, is_used]  # without what follows a separator at the end of each line
    while len(used.columns) > 1 and is_index(used.iloc[:, 0]):  # several, if the table was written several times
        rank_zero_warn(
            f"{path}: the first column has no name and numbers the rows, so it is left out; give it a name to use it"
        )
        used = used.iloc[:, 1:]
    return used


def _count_cells(line: str, separator: str) -> int:
    """How many cells a line has, if they are separated so."""
    try:
        return len(next(csv.reader([line], delimiter=separator)))
    except csv.Error:  # a cell of more than 131,072 characters, as the line of a wide table is with another separator
        return 1


def is_index(values: pd.Series[Any]) -> bool:
    """Whether a column is the row numbers that pandas and R write: it has no name, and different integers.

    They need not be in order, as the rows of a table that was shuffled or split keep their numbers.
    """
    is_integer = values.map(lambda value: value is not None and ROW_NUMBER.fullmatch(str(value)) is not None)
    return UNNAMED.fullmatch(str(values.name)) is not None and bool(is_integer.all()) and not values.duplicated().any()


def decide_types(
    table: pd.DataFrame, given: Mapping[str, Type], name: str, decimal: str = "."
) -> tuple[dict[str, Type], list[str]]:
    """Decide which columns are numbers, and which are texts.

    Numbers are columns of numerals, and of ``true`` and ``false`` without empty cells; cells such as ``NA`` are then
    missing. All others are texts, also numerals with leading zeros.

    Args:
        table: The table.
        given: Types of columns that the user has set.
        name: Of the table, for messages.
        decimal: Decimal separator.

    Returns:
        The type of each column, and for each a line that says what it is.

    Raises:
        ValueError: A column has dates, or numbers that are written in another way, or mostly numbers.
    """
    found, lines = dict[str, Type](), list[str]()
    for column in table.columns:
        found[column], why = _decide(table[column], given.get(column), name, decimal)
        lines.append(f"{column}: {why}")
    return found, lines


def _decide(values: pd.Series[Any], given: Type | None, name: str, decimal: str) -> tuple[Type, str]:
    if given != "text" and (types.is_datetime64_any_dtype(values) or types.is_timedelta64_dtype(values)):
        raise ValueError(
            f"{name}: column {values.name} has dates; convert it to numbers, or set data.ignore=[{values.name}] or "
            f"data.columns='{{{values.name}: text}}'"
        )
    if given == "text":
        return "text", "text, as data.columns says"
    if given == "number":
        to_numbers(values, name, decimal)
        return "number", "number, as data.columns says"
    if types.is_bool_dtype(values) and not values.isna().any():
        return "number", "number, 1 for true and 0 for false"
    if types.is_numeric_dtype(values) and not types.is_bool_dtype(values):
        if types.is_integer_dtype(values):
            _check_distinct(values.dropna().unique().tolist(), name, str(values.name))
        return "number", "number" + _count_missing(int(values.isna().sum()), "")
    texts = to_texts(values)
    known = texts.dropna()
    distinct = pd.Series(known.unique(), dtype=object)
    if distinct.empty:
        raise ValueError(f"{name}: column {values.name} has no values; set data.ignore=[{values.name}]")
    if set(distinct) <= set(FLAGS.values()):
        if len(known) == len(texts):
            return "number", "number, 1 for true and 0 for false"
        return "text", "text, as it has true, false" + _count_missing(len(texts) - len(known), "")
    is_missing = distinct.str.lower().isin(MISSING)
    numerals = distinct[~is_missing]
    is_numeral = ~np.isnan(_parse(numerals, decimal))
    if len(numerals) and is_numeral.all():
        if codes := [text for text in numerals if CODE.fullmatch(text)]:
            return "text", f"text, as {_quoted(codes)} begin with zeros"
        if len(numerals) > 2 and numerals.map(lambda text: bool(COMPACT_DATE.fullmatch(text))).all():
            raise ValueError(
                f"{name}: column {values.name} has dates, such as {numerals.iloc[0]}; convert it to numbers in "
                f"proportion to time, or set data.ignore=[{values.name}] or data.columns='{{{values.name}: number}}'"
            )
        _check_distinct([int(text) for text in numerals if LONG_INTEGER.fullmatch(text)], name, str(values.name))
        tokens = sorted(distinct[is_missing])
        missing = int(texts.isna().sum() + texts.isin(tokens).sum())
        return "number", "number" + _count_missing(missing, f", {_quoted(tokens)} among them" if tokens else "")
    is_written = bool(len(numerals)) and bool(numerals.map(lambda text: bool(WRITTEN.fullmatch(text))).all())
    if (len(numerals) > 2 or is_written) and numerals.map(lambda text: bool(DATE.fullmatch(text))).all():
        raise ValueError(
            f"{name}: column {values.name} has dates; convert it to numbers, or set data.ignore=[{values.name}] or "
            f"data.columns='{{{values.name}: text}}'"
        )
    others = [text for text, is_one in zip(numerals, is_numeral, strict=True) if not is_one]
    written = [text for text in others if WRITTEN.fullmatch(text)] or _with_unit(others) or _disguised(others)
    if len(numerals) and 2 * (len(numerals) - len(others) + len(written)) > len(numerals):
        remedy = f"data.columns='{{{values.name}: text}}' makes a category of each value"
        if written:
            shown, what = written, "is no number in a form that is read"
            remedy = f"write 1234.5, or set data.decimal=',' for 1234,5; {remedy}" if decimal == "." else remedy
        else:
            shown, what = others, "is no number, unlike most values of this column"
            if others == [known.iloc[0]] and (known == others[0]).sum() == 1:
                remedy = f"remove the first row if it belongs to the header, such as units; else {remedy}"
        raise ValueError(f"{name}: column {values.name} has {_quoted(shown)}, which {what}; {remedy}")
    if _has_pattern(numerals):
        raise ValueError(
            f"{name}: column {values.name} has {len(numerals)} texts that differ only in their numbers, such as "
            f"{_quoted(list(numerals))}; convert them to numbers, such as one column for each number in them, or set "
            f"data.ignore=[{values.name}], or data.columns='{{{values.name}: text}}' if each is a category"
        )
    _warn_of_spellings(distinct, name, str(values.name))
    return "text", f"text, {len(distinct)} different" + _count_missing(len(texts) - len(known), "")


def _check_distinct(integers: Sequence[int], name: str, column: str) -> None:
    """Refuse different integers, such as long identifiers, that are the same floating-point number.

    Raises:
        ValueError: There are some.
    """
    seen = dict[float, int]()
    for one in integers:
        if (other := seen.setdefault(float(one), one)) != one:
            raise ValueError(
                f"{name}: column {column} has {other} and {one}, which are the same number in 64 bits; set "
                f"data.columns='{{{column}: text}}' if they are names, data.ignore=[{column}] to leave them out, or "
                f"data.columns='{{{column}: number}}' if the last digits do not matter"
            )


def _warn_of_spellings(distinct: pd.Series[Any], name: str, column: str) -> None:
    """Warn of texts that differ only in case, white space, or in how Unicode composes their letters."""
    spelled = distinct.map(
        lambda text: " ".join(UNSEEN.sub("", unicodedata.normalize("NFKC", text)).split()).casefold()
    )
    if (repeated := spelled.duplicated(keep=False)).any():
        same = distinct[spelled == spelled[repeated].iloc[0]]
        rank_zero_warn(
            f"{name}: column {column} has {' and '.join(ascii(text[:40]) for text in same[:2])} as different "
            "categories; write them alike if they are the same"
        )


def _has_pattern(texts: pd.Series[Any]) -> bool:
    """Whether many texts are the same but for their numbers, as fractions, bounds and ratios are.

    Names such as ``room 12`` begin with a letter.
    """
    patterns = {NUMERALS.sub("0", text) for text in texts} if len(texts) > MAX_PATTERNED else set()
    if len(patterns) > 1 and any(letter.isalpha() for pattern in patterns for letter in pattern):
        return False
    return bool(patterns) and all("0" in pattern and not pattern[0].isalpha() for pattern in patterns)


def _with_unit(texts: Sequence[str]) -> list[str]:
    """Texts that are numbers with one and the same unit, if there are several."""
    found = [(text, match) for text in texts if (match := UNIT.fullmatch(text))]
    units = {(match["code"], match["unit"]) for _, match in found}
    return [text for text, _ in found] if len(found) > EXAMPLES and len(units) == 1 else []


def _disguised(texts: Sequence[str]) -> list[str]:
    """Texts that are numbers in another notation, if there are several."""
    found = [text for text in texts if DISGUISED.fullmatch(text)]
    return found if len(found) > EXAMPLES else []


def to_numbers(values: pd.Series[Any], name: str, decimal: str = ".") -> Floats:
    """Convert a column to numbers; missing ones are NaN.

    Raises:
        ValueError: A value is no number.
    """
    if types.is_numeric_dtype(values):  # also booleans
        return values.to_numpy(np.float64, na_value=np.nan)
    texts = to_texts(values)
    found = _parse(texts.replace({"True": "1", "False": "0"}), decimal)
    is_missing = (texts.isna() | texts.str.lower().isin(MISSING)).to_numpy(bool)
    if (wrong := np.isnan(found) & ~is_missing).any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{name}: column {values.name} must be numeric, but row {row + 1} has {texts.iloc[row][:40]!r}; correct it"
        )
    return found


def to_texts(values: pd.Series[Any]) -> pd.Series[Any]:
    """Convert a column to texts without white space around them; an empty or missing value is None."""
    texts = [
        None if is_missing else str(value).strip() for value, is_missing in zip(values, values.isna(), strict=True)
    ]
    return pd.Series([FLAGS.get(text.lower(), text) or None if text else None for text in texts], dtype=object)


def _parse(texts: pd.Series[Any], decimal: str) -> Floats:
    """The numbers that texts are; NaN for other texts."""
    if decimal != ".":
        texts = texts.str.replace(".", "\0", regex=False).str.replace(decimal, ".", regex=False)
    return np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64)


def _count_missing(count: int, more: str) -> str:
    return f"; {count} missing{more}" if count else ""


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(repr(text[:40]) for text in texts[:EXAMPLES]) + (" …" if len(texts) > EXAMPLES else "")
