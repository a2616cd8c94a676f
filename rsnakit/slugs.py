"""Titles, ids and slugs of data sets and notebooks, checked as Kaggle's client checks them.

Kaggle makes the address of what is uploaded from its title. Where the id says another one, a second data set or notebook
comes about, or an odd error; so both are checked here, before anything is sent.
"""

import re

# Characters that a title may have, by what it is the title of. Kaggle's client refuses data sets outside these, and notebooks
# below five; that a notebook's title ends at 50 too is the site's rule.
LENGTHS = {"data set": (6, 50), "notebook": (5, 50)}
OWNER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?")
PLACEHOLDERS = ("insert_", "insert-")  # how the client's templates mark what is to be filled in
UNFILLED = ("your-username", "your_username", "username", "owner", "name")  # as instructions have it


class SlugError(ValueError):
    """A title, id or owner that Kaggle would refuse, or take for another one; the message says what to write instead."""


def slugify(title: str) -> str:
    """The last part of the address that Kaggle gives to a title, by the function that its client uses.

    Raises:
        SlugError: python-slugify, which comes with the package kaggle, is not installed.
    """
    try:
        from slugify import slugify as clients
    except ImportError:
        raise SlugError(
            "python-slugify is not installed, by which Kaggle's client makes ids of titles; pip install kaggle brings it"
        ) from None
    return clients(title)


def check_owner(owner: str) -> str:
    """The Kaggle user, or organisation, whose data set and notebook these are; returned as given.

    Raises:
        SlugError: it is empty, a placeholder, or cannot be part of an address.
    """
    lower = owner.lower()
    if not owner or lower in UNFILLED or lower.startswith(PLACEHOLDERS):
        raise SlugError(
            f"owner is {owner!r}: give your user name on Kaggle, the one in the address of your profile: kaggle.com/NAME"
        )
    if not OWNER.fullmatch(owner):
        raise SlugError(
            f"owner is {owner!r}, expected letters, digits, dashes and underscores as in the address of your profile, "
            "kaggle.com/NAME (not the name that is shown, nor an e-mail address)"
        )
    return owner


def check_pair(id: str, title: str, what: str) -> str:
    """An id that its title leads to.

    Args:
        id: `owner/slug`.
        title: what Kaggle shows.
        what: `data set` or `notebook`, which are the keys of `LENGTHS`.

    Returns:
        The slug.

    Raises:
        SlugError: not of this form, a placeholder, too short or too long, or the title makes another slug.
    """
    owner, _, slug = id.partition("/")
    if not slug or "/" in slug:
        raise SlugError(f"{what}: id is {id!r}, expected owner/slug")
    check_owner(owner)
    for name, value in (("id", slug), ("title", title)):
        if value.lower().startswith(PLACEHOLDERS):
            raise SlugError(f"{what}: {name} is {value!r}, a placeholder of Kaggle's template; fill it in")
    made = check_title(title, what)
    if slug != made:
        raise SlugError(
            f"{what}: the title {title!r} makes the id {owner}/{made}, and the id given is {id}. Kaggle goes by the title: "
            f"give the id {owner}/{made}, or a title that makes {slug!r}."
        )
    return slug


def check_title(title: str, what: str) -> str:
    """The slug of a title that Kaggle would take.

    Raises:
        SlugError: the title, or its slug, is too short or too long, or the title goes over several lines.
    """
    low, high = LENGTHS[what]
    if not title.isprintable():
        raise SlugError(f"{what}: the title {title!r} has a line break or another character that is not to be seen")
    slug = slugify(title)
    for name, value in (("title", title), ("id", slug)):
        if not low <= len(value) <= high:
            of = f", which the title {title!r} makes," if name == "id" else ""
            raise SlugError(
                f"{what}: the {name} {value!r}{of} has {len(value)} characters, expected {low} to {high}; give another title"
            )
    return slug
