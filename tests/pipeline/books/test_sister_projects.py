"""The wrapping of Project Gutenberg's sister projects is removed, and their books are kept."""

import pytest

from pipeline.books.gutenberg import unwrap

BOOK = "PAGES\n\nBY A. WRITER\n\n\nCHAPTER I\n\n" + "".join(
    f"The morning was clear, and {n} men went down the river.\n" + "\n" * (n % 4 == 0) for n in range(200)
)
AUSTRALIA = (
    "\nProject Gutenberg Australia\n\nTitle: Pages\nAuthor: A. Writer (1900-1950)\n"
    "* A Project Gutenberg of Australia eBook *\neBook No.:  0100021.txt\nLanguage:   English\n"
    "Date first posted: August 2001\n\nThis eBook was produced by: Some One\n\n"
    "Project Gutenberg of Australia eBooks are created from printed editions\nwhich are in the public domain.\n\n"
    "Copyright laws are changing all over the world. Be sure to check the\ncopyright laws for your country.\n\n"
    "This eBook is made available at no cost and with almost no restrictions\nwhatsoever.\n\n"
    "To contact Project Gutenberg of Australia go to http://gutenberg.net.au\n\n"
    "Title:      Pages\nAuthor:     A. Writer\n\n\n\n\n"
)
OLD_AUSTRALIA = (
    "Project Gutenberg of Australia\na treasure-trove of literature\n"
    "treasure found hidden with no evidence of ownership\n\nTitle: Pages\nAuthor: A. Writer\n"
    "eBook No.: 0000001h.html\nLanguage: English\n\n"
)
CANADA = (
    "* A Project Gutenberg Canada Ebook *\n\nThis ebook is made available at no cost and with very few\n"
    "restrictions. If either of these conditions applies, please\ncheck gutenberg.ca before proceeding.\n\n"
    "This work is in the Canadian public domain, but may be\nunder copyright in some countries.\n\n"
    "Title: Pages\nAuthor: Writer, A. (1900-1950)\nDate of first publication: 1925\n"
    "Edition used as base for this ebook:\n   New York: Scribner, 1925\nDate first posted: 24 November 2008\n"
    "Project Gutenberg Canada ebook #206\n\nThis ebook was produced by: Some One\n"
    "& the Online Distributed Proofreading Canada Team\nat http://www.pgdpcanada.net\n\n\n\n\n"
)
FADED_PAGE = (
    "* A Distributed Proofreaders Canada eBook *\n\nThis eBook is made available at no cost and with very few\n"
    "restrictions.\n\n_Title:_ Pages\n_Date of first publication:_ 1936\n_Author:_ A. Writer (1900-1960)\n"
    "_Date first posted:_ January 4, 2014\nFaded Page eBook #20140107\n\nThis eBook was produced by: Some One,\n"
    "& the online Distributed Proofreaders Canada team at http://www.pgdpcanada.net\n\n"
    "[This file was produced from images generously made available by the Internet Archive]\n\n\n\n"
)
CLOSINGS = {
    "Australia": "\n\nThis site is full of FREE ebooks - Project Gutenberg Australia\n",
    "Australia, old": "\n\nProject Gutenberg Australia\n",
    "Canada": "\n\nEnd of the Project Gutenberg Canada edition of Pages\n",
    "brackets": "\n\n\n[The end of _Pages_ by A. Writer]\n",
    "brackets, plain": "\n\n[End of Pages, by A. Writer]\n",
    "none": "",
}


@pytest.mark.parametrize("closing", CLOSINGS.values(), ids=CLOSINGS)
@pytest.mark.parametrize("header", [AUSTRALIA, OLD_AUSTRALIA, CANADA, FADED_PAGE])
def test_header_and_closing_line_are_removed_and_the_book_kept(header: str, closing: str) -> None:
    unwrapped = unwrap((header + BOOK + closing).encode())
    assert unwrapped.body.decode().split() == BOOK.split()
    assert unwrapped.fields["title"] == "Pages"
    assert "Writer" in unwrapped.fields["author"]
    assert unwrapped.removed["header"] > 100
    assert unwrapped.removed["footer"] == len(closing.strip())


def test_a_text_about_a_sister_project_is_kept_whole() -> None:
    for begin in (
        "Project Gutenberg Australia\n\nIt was founded in 2001, and its books are made available at no cost.\n\n",
        "Project Gutenberg Canada is a sister.\n\nLanguage is what it is about. Date of first publication: 1923.\n\n",
    ):
        text = f"{begin}{BOOK}\n[End of the first part]\n"
        assert unwrap(text.encode()).body.decode() == text


def test_another_line_in_brackets_at_the_end_is_kept() -> None:
    book = BOOK + "\n[End of Volume One]\n"
    assert unwrap((CANADA + book).encode()).body.decode().split() == book.split()
