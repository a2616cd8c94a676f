"""rsnakit.slugs: titles and ids, against what the real client says of the same ones."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from rsnakit import slugs
from rsnakit.slugs import SlugError

TITLES = [
    "RSNA: Train (v2)!", "Brustkrebs für Anfänger", "乳がん detection", "  spaces  and___underscores ", "it's a 'test'",
    "a&amp;b &#38; c", "Ünï-cødé — dash", "UPPER lower", "--dashes--", "1,000 runs",
    "rsnakit demo-tf_efficientnet_lite0-1a2b3c4d",
]  # fmt: skip


def client_source() -> str:
    """The text of the installed client. It is read, not imported: importing it looks for credentials."""
    spec = importlib.util.find_spec("kaggle")
    return (Path(spec.origin).parent / "api" / "kaggle_api_extended.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", TITLES)
def test_slugs_are_those_of_the_clients_own_function(title):  # K01
    import slugify

    assert slugs.slugify(title) == slugify.slugify(title)


def test_the_client_still_checks_as_it_is_taken_to():
    """The rules that `slugs` repeats stand in the client that is installed; where it changes them, this fails."""
    text = client_source()
    assert "from slugify import slugify" in text
    assert "kernel_slug.lower() != as_slug" in text and "as_slug = slugify(cast(str, title))" in text
    bounds = re.findall(r"len\((?:dataset_slug|title)\) < (\d+) or len\((?:dataset_slug|title)\) > (\d+)", text)
    low, high = slugs.LENGTHS["data set"]
    assert bounds[:2] == [(str(low), str(high))] * 2
    assert f"len(cast(str, title)) < {slugs.LENGTHS['notebook'][0]}" in text
    assert set(re.findall(r"INSERT_\w+", text))  # what placeholders look like


def test_a_title_that_makes_its_id_passes():  # K01
    assert slugs.slugify("RSNA: Train (v2)!") == "rsna-train-v2"
    assert slugs.check_pair("me-2/rsna-train-v2", "RSNA: Train (v2)!", "data set") == "rsna-train-v2"
    assert slugs.check_pair("Jane/fives", "fives", "notebook") == "fives"


@pytest.mark.parametrize(
    ("id", "title", "what", "said"),
    [
        ("jane/rsna-train", "RSNA: Train (v2)!", "data set", "makes the id jane/rsna-train-v2"),
        ("jane/RSNA-train-v2", "RSNA: Train (v2)!", "notebook", "makes the id jane/rsna-train-v2"),
        ("jane/fives", "fives", "data set", "5 characters, expected 6 to 50"),
        ("jane/two-lines-title", "two\nlines title", "data set", "has a line break"),
        ("jane/four", "four", "notebook", "4 characters, expected 5 to 50"),
        ("jane/" + "a" * 51, "a" * 51, "data set", "51 characters"),
        ("jane/" + "a" * 51, "a" * 51, "notebook", "51 characters"),
        ("jane/abc", "a!!!!!!!b!!c", "notebook", "makes the id jane/a-b-c"),
        ("jane/a-b", "a!!!!!!!b", "notebook", "the id 'a-b', which the title 'a!!!!!!!b' makes, has 3"),
        ("jane/insert_slug_here", "INSERT_TITLE_HERE", "data set", "placeholder"),
        ("jane/INSERT_SLUG_HERE", "Insert slug here", "data set", "placeholder"),
        ("rsna-train-v2", "RSNA: Train (v2)!", "data set", "expected owner/slug"),
        ("jane/rsna-train-v2/3", "RSNA: Train (v2)!", "notebook", "expected owner/slug"),
        ("/rsna-train-v2", "RSNA: Train (v2)!", "notebook", "owner is ''"),
        ("INSERT_USER/rsna-train-v2", "RSNA: Train (v2)!", "notebook", "kaggle.com/NAME"),
    ],
)
def test_what_kaggle_would_refuse_or_take_for_another_is_refused(id, title, what, said):  # K01, K02
    with pytest.raises(SlugError, match=re.escape(said)):
        slugs.check_pair(id, title, what)


@pytest.mark.parametrize("owner", ["", "INSERT_USER", "insert_owner_slug_here", "your-username", "NAME", "owner"])
def test_a_placeholder_is_no_owner(owner):  # K02
    with pytest.raises(SlugError, match="your user name on Kaggle"):
        slugs.check_owner(owner)


@pytest.mark.parametrize(
    "owner", ["Jane Doe", "jane@home.org", "jane/x", "jane.doe", "-jane", "jäne", "../x", "jane\n"]
)
def test_what_cannot_stand_in_an_address_is_no_owner(owner):
    with pytest.raises(SlugError, match="letters, digits, dashes"):
        slugs.check_owner(owner)


@pytest.mark.parametrize("owner", ["jane", "JaneDoe", "jane-doe-2", "7_eleven"])
def test_user_names_pass(owner):
    assert slugs.check_owner(owner) == owner


def test_without_the_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "slugify", None)
    with pytest.raises(SlugError, match="pip install kaggle"):
        slugs.slugify("anything")
