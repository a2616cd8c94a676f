"""rsnakit.elements: an element that is malformed costs no more than itself."""

import pydicom
import pytest
from pydicom.dataset import Dataset

from rsnakit.elements import header_integer, header_numbers, photometric, transfer_syntax


def header(**elements):
    made = Dataset()
    for keyword, value in elements.items():
        setattr(made, keyword, value)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1500", (1500.0,)), (["40.5", "-7e2"], (40.5, -700.0)), (3, (3.0,)), ("", ()), (None, ())],
)
def test_numbers_of_one_or_many_values(value, expected, caplog):
    assert header_numbers(header(WindowCenter=value), "WindowCenter") == expected
    assert header_numbers(header(), "WindowCenter") == () and not caplog.records


@pytest.mark.parametrize("value", ["nan", ["1", "inf"]])
def test_what_is_no_number_is_passed_over_with_a_word(value, caplog):
    assert header_numbers(header(WindowCenter=value), "WindowCenter") == ()
    assert "unreadable WindowCenter passed over" in caplog.text


@pytest.mark.parametrize(
    ("element", "expected"),
    [(("US", 12), 12), (("US", 0), 0), (("IS", "3"), 3), (("DS", "4.0"), 4), (("US", None), None), (("SH", ""), None)],
)
def test_integers_of_any_value_representation(element, expected):
    made = Dataset()
    made.add_new("BitsStored", *element)
    assert header_integer(made, "BitsStored") == expected
    assert header_integer(made, "Rows") is None


@pytest.mark.parametrize("element", [("US", [12, 13]), ("DS", "4.5"), ("SH", "twelve"), ("FL", float("inf"))])
def test_what_is_no_integer_is_refused_by_name(element):
    made = Dataset()
    made.add_new("BitsStored", *element)
    with pytest.raises(ValueError, match=r"BitsStored is .*expected a whole number"):
        header_integer(made, "BitsStored")


def test_an_element_that_cannot_be_parsed_is_refused_by_name():
    made = pydicom.Dataset()
    raw = pydicom.dataelem.RawDataElement(pydicom.tag.Tag("Rows"), "US", 3, b"\1\2\3", 0, False, True)
    made[raw.tag] = raw
    with pytest.raises(ValueError, match="Rows cannot be read: BytesLengthException"):
        header_integer(made, "Rows")


def test_photometric_interpretation_is_trimmed():
    for text in ("MONOCHROME1", " monochrome1 ", "Monochrome1\0"):
        assert photometric(header(PhotometricInterpretation=text)) == "MONOCHROME1"
    assert photometric(header()) == ""


def test_transfer_syntax_of_a_header_that_does_not_say():
    made = header()
    for (implicit, little), expected in {
        (True, True): "1.2.840.10008.1.2",
        (False, True): "1.2.840.10008.1.2.1",
        (False, False): "1.2.840.10008.1.2.2",
    }.items():
        made.set_original_encoding(implicit, little)
        assert transfer_syntax(made) == expected
