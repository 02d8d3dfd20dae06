"""Golden forms of Project Gutenberg's wrapping: it is removed, and the book is kept."""

import itertools

import pytest

from pipeline.books.gutenberg import declared_encoding, unwrap

LICENCE = "\n\nUpdated editions will replace the previous one.\n\n*** START: FULL LICENSE ***\n\nTHE FULL LICENSE\n" * 3
BOOK = "A TALE\n\nBy Somebody\n\n\nCHAPTER I.\n\nIt began.\n\nIt went on.\n\n\nTHE END\n"
FIELDS = (
    "Title: A Tale\n\nAuthor: Somebody Else\n\nRelease Date: May 9, 2008 [EBook #123]\n\nLanguage: English\n\n"
    "Character set encoding: ISO-8859-1\n\n"
)
HEADER = f"The Project Gutenberg EBook of A Tale, by Somebody Else\n\n{FIELDS}"

HEADS = {
    "this": HEADER + "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n\n",
    "the, tight": HEADER + "***START OF THE PROJECT GUTENBERG EBOOK A TALE***\n\n",
    "over two lines": HEADER + "***START OF THE PROJECT GUTENBERG EBOOK A TALE, BEING A VERY\nLONG ONE***\n\n",
    "asterisks alone": HEADER + "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE\n***\n\n",
    "small print": HEADER + "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nlaw\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n",
    "small print, later": HEADER + "***START**THE SMALL PRINT!**START***\nlaw\n"
    "*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.07/27/01*END*\n\n",
    "small print, then a start line": HEADER + "***START**THE SMALL PRINT!**START***\nlaw\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\nlaw\n\n" + FIELDS +
    "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n\n",
    "small print, then a start line far behind": HEADER + "***START**THE SMALL PRINT!**START***\nlaw\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n" + "law\n\n" * 1000 + FIELDS
    + "*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\n",
    "a start line, then small print": HEADER + "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n\nlaw\n\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n",
    "credits": HEADER + "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n\n\n\n"
    "Produced by Some One and the Online\n"
    "Distributed Proofreading Team at http://www.pgdp.net\n\n\n\n\n",
    "credits and links": HEADER + "***START OF THE PROJECT GUTENBERG EBOOK A TALE***\n\n\n"
    "E-text prepared by Some One\n\n\n\n"
    "Note: Project Gutenberg also has an HTML version of this\n      file which includes the original illustrations.\n"
    "      See 123-h.htm or 123-h.zip:\n      (http://www.gutenberg.org/files/123/123-h.zip)\n\n\n"
    "Transcriber's note:\n\n      Italics are enclosed by underscores.\n\n\n\n\n",
    "bracketed note": HEADER + "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n\nProduced by Some One\n\n\n"
    "[Transcriber's Note: This etext was produced from\n   Galaxy Magazine.\n\n   No copyright was found.]\n\n\n",
}  # fmt: skip

SMALL_PRINT = (
    '***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this "Small Print!" statement here?\n\n'
    "*BEFORE!* YOU USE OR READ THIS ETEXT\nBy using any part of this PROJECT GUTENBERG-tm etext, you agree.\n\n"
)
PRINTED = f"{SMALL_PRINT}*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n"

TAILS = {
    "this": "\n\n\nEnd of the Project Gutenberg EBook of A Tale, by Somebody Else\n\n"
    "*** END OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n" + LICENCE,
    "the, tight": "\n\n\n***END OF THE PROJECT GUTENBERG EBOOK A TALE***\n" + LICENCE,
    "apostrophe": "\n\nEnd of Project Gutenberg's A Tale, by Somebody Else\n\n"
    "*** END OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n" + LICENCE,
    "curly apostrophe": "\n\nEnd of Project Gutenberg’s A Tale, by Somebody Else\n",
    "old": "\n\n\nEnd of this Project Gutenberg Etext of A Tale\nby Somebody Else.\n\n",
    "starred": "\n\n\n*Project Gutenberg Etext of A Tale, by Somebody Else*\n\n",
}


@pytest.mark.parametrize("head", HEADS)
def test_header_and_footer_are_removed_and_the_book_kept(head: str) -> None:
    for name, tail in TAILS.items():
        unwrapped = unwrap((HEADS[head] + BOOK + tail).encode())
        assert unwrapped.body.decode().strip() == BOOK.strip(), name
        assert unwrapped.fields == {
            "title": "A Tale", "author": "Somebody Else", "language": "English", "released": "May 9, 2008"
        }  # fmt: skip
        for copies in (1, 50):  # a text that was joined to one line keeps its book
            book = (BOOK * copies).replace("\n", " ").strip().encode()
            joined = unwrap((HEADS[head] + BOOK * copies + tail).replace("\n", " ").encode())
            assert book in joined.body, name
            assert b"LICENSE" not in joined.body, name
            assert (joined.fields["author"], joined.fields["released"]) == ("Somebody Else", "May 9, 2008")


def test_a_closing_note_is_removed() -> None:
    body = (BOOK * 200).rstrip()
    note = "\n\n\n\n\nTRANSCRIBER’S NOTES:\n\n  Hyphens were kept.\n\n  Page 9: teh changed to the.\n"
    unwrapped = unwrap((HEADS["this"] + body + note + TAILS["this"]).encode())
    assert unwrapped.body.decode().strip() == body
    assert "closing note" in unwrapped.patterns


def test_text_after_a_closing_note_is_kept() -> None:
    body = (BOOK * 200).rstrip()
    note = "\n\n\n\n\nTranscriber's Notes:\n\nHyphens were kept.\n"
    for heading in ("FOOTNOTES:", "Index", "APPENDIX A", "  _Glossary_", "ADVERTISEMENTS."):
        behind = f"\n\n\n{heading}\n\n" + "[1] Of this more is said elsewhere.\n\n" * 100
        kept = unwrap((HEADS["this"] + body + note + behind + TAILS["this"]).encode()).body.decode().strip()
        assert kept.startswith(body)
        assert kept.endswith(behind.strip())


CLOSING_NOTES = {
    "one paragraph": "Transcriber's note: page 211 is missing from the original.\n",
    "several": "TRANSCRIBER'S NOTES\n\nSpelling was retained.\n\n  Pg 3. teh changed to the.\n",
    "in brackets": "[Transcriber's Note: A page is missing from the original.]\n",
}
BEHIND_NOTES = {
    "a chapter": "THE LAST CHAPTER\n\n" + "It went on, and he did what he had always done.\n\n" * 99,
    "without a heading": "It went on, and he did what he had always done.\n\n" * 99,
    "one paragraph": "And they lived happily ever after.\n",
    "verse": "  The curfew tolls the knell of parting day,\n  The lowing herd winds slowly.\n",
    "one that names a page": "Epilogue\n\nHe turned the page 9 that she had changed.\n",
    "a footnote": "[Footnote 1: See Gibbon.]\n",
    "the end": "THE END\n",
}


@pytest.mark.parametrize("note", CLOSING_NOTES)
@pytest.mark.parametrize("behind", BEHIND_NOTES)
def test_what_follows_a_note_near_the_end_is_kept_with_it(note: str, behind: str) -> None:
    body = (BOOK * 300).rstrip() + "\n\n\n" + CLOSING_NOTES[note]
    kept = unwrap((HEADS["this"] + body + "\n" + BEHIND_NOTES[behind] + TAILS["this"]).encode())
    assert kept.body.decode().split() == (body + BEHIND_NOTES[behind]).split()
    alone = unwrap((HEADS["this"] + body + TAILS["this"]).encode())
    assert alone.body.decode().split() == (BOOK * 300).split()
    assert alone.removed["closing note"] == len(CLOSING_NOTES[note].strip())


def test_a_closing_note_is_no_more_than_a_fourth_of_a_text() -> None:
    note = "\n\n\nTranscriber's Notes:\n\n" + "Page 9: teh changed to the.\n\n" * 200
    for copies, is_kept in ((90, True), (900, False)):
        body = (BOOK * copies).rstrip()
        found = unwrap((HEADS["this"] + body + note + TAILS["this"]).encode()).body.decode()
        assert (found.split() == (body + note).split()) == is_kept


NOTES = {
    "a paragraph": "Transcriber's Note: Letters that are superscript are\npreceded by a caret.\n",
    "a bare heading": "TRANSCRIBER'S NOTES\n\n\nObvious errors have been\ncorrected.\n\n  Italics are _so_.\n",
    "indented": "Transcriber's note:\n\n      Words are underscored.\n\n      A list is at the end.\n",
}
OPENINGS = {
    "capitals": "THE CLUB.\n\nM.DCCC.XXXI.\n\n\n\nSir Walter.\n\n\n",
    "a chapter": "Chapter I.\n\nIt began.\n\n  And went on.\n\n\n\n",
    "contents": "  Contents\n\n  One\n\n  Two\n\n\n",
}


@pytest.mark.parametrize("note", NOTES)
def test_an_opening_note_is_removed_without_any_of_the_book(note: str) -> None:
    for opening, gap in itertools.product(OPENINGS.values(), ("\n", "\n\n\n")):
        book = opening + BOOK
        unwrapped = unwrap((HEADS["this"] + NOTES[note] + gap + book + TAILS["this"]).encode())
        assert unwrapped.body.decode().strip() == book.strip()
        assert "opening note" in unwrapped.patterns


def test_verse_after_an_opening_note_is_not_part_of_it() -> None:
    verse = "  The curfew tolls the knell of parting day,\n  The lowing herd winds slowly.\n\n" * 4
    note = "Transcriber's note: Italics are underscored.\n\n"
    unwrapped = unwrap((HEADS["this"] + note + verse + BOOK + TAILS["this"]).encode())
    assert unwrapped.body.decode().split() == (verse + BOOK).split()


CREDITS = {
    "people": "Produced by Some One, Another Person and David Widger\n",
    "team": "Produced by Some One and the Online\nDistributed Proofreading Team at http://www.pgdp.net\n",
    "brackets": "[This etext was prepared by Some One, some@one.net, from the 1898 edition.]\n",
    "credits": "Credits: Some One and the Online Distributed Proofreading Team\n",
    "typed": "Typed by Some One for Project Gutenberg, and proofed by Another\n",
    "thanks": "Special thanks to Some One for the scans of this e-text\n",
    "French": "Produit par Some One (cette édition est du domaine public) pour Project Gutenberg\n",
    "Portuguese": "Produzido por Some One, e-book do Project Gutenberg\n",
}
NO_CREDITS = {
    "nature": "Produced by a volcano in 1883, the island rose from the sea within a week.\n",
    "a stage": "Produced by Charles Frohman at the Empire Theatre, New York\n",
    "an office": "Prepared by the Historical Section of the Foreign Office\n",
    "an edition": "An edition of this work was printed in 1823, and the author has corrected it.\n",
    "a new edition": "Updated and revised edition, 1897\n",
    "a note": "Note: The original title page names no author, and none was found.\n",
    "a book": "The book was produced in haste, and this text prepared from the author's papers.\n",
    "a scan": "Transcribed from memory, for my children, who asked for it.\n",
}


@pytest.mark.parametrize("credit", CREDITS)
def test_credits_of_any_form_are_removed_and_counted(credit: str) -> None:
    for title in ("", "A TALE\n\nBy Somebody\n\n") if credit in ("brackets", "typed") else ("",):
        unwrapped = unwrap(
            (HEADS["this"] + title + CREDITS[credit] + "\n\n\n" + tale("ALPHA") + TAILS["this"]).encode()
        )
        assert unwrapped.body.decode().split() == (title + tale("ALPHA")).split()
        assert unwrapped.removed["credits"] == len(CREDITS[credit].strip())


@pytest.mark.parametrize("first", NO_CREDITS.values(), ids=NO_CREDITS)
def test_a_first_paragraph_that_begins_as_credits_do_is_kept(first: str) -> None:
    unwrapped = unwrap((HEADS["this"] + first + "\n" + tale("ALPHA") + TAILS["this"]).encode())
    assert unwrapped.body.decode().split() == (first + tale("ALPHA")).split()


def test_what_is_removed_is_counted_in_characters_by_rule() -> None:
    header, footer = HEADS["this"], TAILS["this"]
    added = "Produced by Søme One\n\n\n" + NOTES["a paragraph"] + "\n\n"
    unwrapped = unwrap((header + added + BOOK + footer).encode())
    assert unwrapped.removed == {
        "header": len(header.strip()), "footer": len(footer.strip()), "credits": len("Produced by Søme One"),
        "opening note": len(NOTES["a paragraph"].strip()),
    }  # fmt: skip
    assert unwrap(BOOK.encode()).removed == {}


def test_notices_between_the_scenes_of_the_1993_shakespeare_are_removed() -> None:
    notice = "<<THIS ELECTRONIC VERSION OF THE COMPLETE WORKS OF WILLIAM\nSHAKESPEARE IS COPYRIGHT 1990-1993>>\n\n\n"
    head = (
        "This Etext file is presented by Project Gutenberg, in\ncooperation with World Library, Inc.\n\n" + notice
        + "The Complete Works of William Shakespeare\nThe Tragedy of Macbeth\n\n"
        '***** SMALL PRINT! for COMPLETE SHAKESPEARE *****\n\nlaw\n\n'
        '****   SMALL PRINT! FOR __ COMPLETE SHAKESPEARE ****\n'
        '["Small Print" V.12.08.93]\n\n'
    )  # fmt: skip
    unwrapped = unwrap(f"{head}{notice}1606\n\nACT I.\n\n{notice}ACT II.\n\nTHE END\n".encode())
    assert unwrapped.body.decode().strip() + "\n" == "1606\n\nACT I.\n\nACT II.\n\nTHE END\n"
    assert unwrapped.fields["title"] == "The Tragedy of Macbeth"


def test_a_book_without_wrapping_is_unchanged() -> None:
    text = b"Produced by hand, by a transcriber.\n\nEnd of this etext was near, he said.\n"
    assert unwrap(text).body == text
    assert unwrap(b"").body == b""


def test_words_of_the_footer_inside_a_book_do_not_end_it() -> None:
    book = BOOK.replace("It went on.", "He saw the end of the Project Gutenberg, and wept; that was END OF IT.\n" * 3)
    assert unwrap((HEADS["this"] + book + TAILS["this"]).encode()).body.decode().strip() == book.strip()


def test_the_declared_character_set_is_read_in_its_own_words() -> None:
    assert declared_encoding(HEADER.encode()) == "ISO-8859-1"
    assert declared_encoding(BOOK.encode()) is None


def test_a_footer_far_from_the_end_is_found() -> None:
    license_text = "The license of Project Gutenberg goes on and on.\n\nAnd so it does.\n\n" * 600
    assert 24_000 < len(license_text) < 60_000
    unwrapped = unwrap((HEADS["this"] + BOOK * 10 + TAILS["the, tight"] + license_text).encode())
    assert unwrapped.body.decode().strip() == (BOOK * 10).strip()


def test_the_first_of_repeated_fields_counts_and_a_posting_date_suffices() -> None:
    header = "Title: A Tale\nTitle: Another\nPosting Date: May 9, 2008 [EBook #123]\n\n"
    book = "Author: a word of the book\n\n" + BOOK
    unwrapped = unwrap((header + "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***\n\n" + book).encode())
    assert unwrapped.fields == {"title": "A Tale", "released": "May 9, 2008"}
    header = f"Release Date: June 1\n{header}*** START OF THIS PROJECT GUTENBERG EBOOK ***\n"
    both = unwrap((header + BOOK).encode())
    assert both.fields["released"] == "June 1"


def test_brackets_in_a_bracketed_note_do_not_end_it() -> None:
    note = "[Transcriber's Note: Of Galaxy [1952].\n\n   No [such] copyright was found.]\n\n\n"
    unwrapped = unwrap((HEADS["this"] + note + BOOK + TAILS["this"]).encode())
    assert unwrapped.body.decode().strip() == BOOK.strip()


def test_a_bracketed_note_in_the_last_chapter_is_kept_with_it() -> None:
    book = (BOOK * 200).rstrip() + "\n\n[Transcriber's Note: A page is missing.]\n\n" + BOOK * 5
    unwrapped = unwrap((HEADS["this"] + book + TAILS["this"]).encode())
    assert unwrapped.body.decode().strip() == book.strip()


def test_a_long_paragraph_belongs_to_the_book_unless_it_names_project_gutenberg() -> None:
    credits = "Produced by Some One for Project Gutenberg, " + "from images of a library, " * 25
    unwrapped = unwrap((HEADS["this"] + credits + "\n\n\n" + BOOK + TAILS["this"]).encode())
    assert unwrapped.body.decode().strip() == BOOK.strip()


def test_credits_are_never_all_of_a_book() -> None:
    credits = "Produced by Some One and the Online Distributed Proofreading Team.\n"
    unwrapped = unwrap((HEADS["this"] + credits + TAILS["this"]).encode())
    assert unwrapped.body.decode().strip() == credits.strip()


def tale(name: str, lines: int = 200) -> str:
    return (
        f"{name}\n\nCHAPTER I OF {name}\n\n" + f"A line of {name}, which goes on.\n" * lines + f"\nThe end of {name}.\n"
    )


OF_1998 = "*Project Gutenberg Etext of A Tale, by Somebody Else*\n#2 in our series\n\n" + "Please read this.\n\n" * 300
MODERN_END = (
    "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\nUpdated editions will replace the previous one.\n\n"
    + "THE FULL PROJECT GUTENBERG LICENSE\n\nAnd so on.\n\nThis eBook is for the use of anyone anywhere.\n\n" * 20
    + "how to subscribe to our email newsletter to hear about new eBooks.\n"
)
BOTTOM = (
    "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\nThis file should be named a10.txt or a10.zip\n\n"
    f"Project Gutenberg eBooks are often created from several printed\neditions.\n\n{PRINTED}"
)
FORMS = {
    "modern": (HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\n", MODERN_END),
    "copyrighted": (
        HEADER + "*** START OF THE COPYRIGHTED PROJECT GUTENBERG EBOOK A TALE ***\n\n",
        "\n\n*** END OF THE COPYRIGHTED PROJECT GUTENBERG EBOOK A TALE ***\n",
    ),
    "small print": (OF_1998 + PRINTED, "\n\nEnd of Project Gutenberg's Etext of A Tale, by Somebody Else\n\n"),
    "small print at the end": (HEADER + "*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\n", BOTTOM),
}


@pytest.mark.parametrize("lines", [2, 200, 20_000])
def test_a_file_may_hold_several_books_of_any_form(lines: int) -> None:
    for first, second in itertools.product(FORMS, FORMS):
        names = {"ALPHA": first, "BETA": second, "GAMMA": first}
        books = [tale(name, lines) for name in names]
        wrapped = [FORMS[form][0] + book + FORMS[form][1] for form, book in zip(names.values(), books, strict=True)]
        assert unwrap("".join(wrapped).encode()).body.decode().split() == "".join(books).split(), (first, second)


@pytest.mark.parametrize("form", ["modern", "small print at the end", "copyrighted"])
def test_other_texts_around_books_are_kept(form: str) -> None:
    book, others = tale("ALPHA"), [tale(name, 30) for name in ("BEFORE", "BETWEEN", "BEHIND")]
    wrapped = FORMS[form][0] + book + FORMS[form][1]
    whole = f"{others[0]}{wrapped}\n{others[1]}\n{wrapped}{others[2]}"
    expected = others[0] + book + others[1] + book + others[2]
    assert unwrap(whole.encode()).body.decode().split() == expected.split()


def test_small_print_at_the_end_is_removed_however_short_the_book() -> None:
    print_ = "\n*** START: SMALL PRINT! for COPYRIGHT PROTECTED ETEXTS ***\nlaw\n*** END: SMALL PRINT! ***\n"
    for lines, opening in itertools.product((2, 100, 10_000), ("Project Gutenberg Etext of A Tale\n\n", "")):
        for printed in (print_, f"\n{PRINTED}"):
            found = unwrap((opening + tale("ALPHA", lines) + printed).encode()).body.decode()
            assert found.split() == (tale("ALPHA", lines) + ("" if opening else printed)).split()


@pytest.mark.parametrize(
    "closing",
    [
        "Ende dieses Project Gutenberg Etextes Eine Geschichte, von Jemand", "Fin de Project Gutenberg's Un Conte",
        "Ende dieses Projekt Gutenberg Etextes Eine Geschichte", "Fin du Project Gutenberg Etext de Un Conte",
        "Fine del Project Gutenberg Etext di Un Racconto", "Fine di questo Etext Project Gutenberg",
        "End of this is COPYRIGHTED Project Gutenberg Etext of A Tale", "Einde van dit Project Gutenberg Etext",
        "**This is a COPYRIGHTED Project Gutenberg Etext, Details Above**",
        "Fin de Proyecto Gutenberg Etext de Un Cuento",
        "Fin del Proyecto Gutenberg EBook de Un Cuento, de Alguien", "Fim do Projecto Gutenberg de Um Conto",
        "Fim do Projeto Gutenberg EBook de Um Conto", "Fino de la Projekto Gutenberg", "Koniec Projektu Gutenberg",
        "End of The Project Gutenberg Etext of A Tale",
    ],
)  # fmt: skip
def test_the_closing_sentences_of_other_languages_are_removed(closing: str) -> None:
    for head in (HEADS["this"], OF_1998 + PRINTED):
        for tail in (f"\n\n{closing}\n", f"\n\n{closing}\n\n{TAILS['this'].lstrip()}"):
            assert unwrap((head + tale("ALPHA") + tail).encode()).body.decode().split() == tale("ALPHA").split()


START, END = (
    "*** START OF THIS PROJECT GUTENBERG EBOOK A TALE ***",
    "*** END OF THIS PROJECT GUTENBERG EBOOK A TALE ***",
)
QUOTES = {
    "in a line": f"A header ends with {START} and after it\nthe book begins, up to {END} in most files.\n\n",
    "lines of their own": f"It begins\n\n{START}\n\nand ends\n\n{END}\n\nas we have seen.\n\n",
    "indented": f"It begins\n\n    {START}\n\nand ends\n\n    {END}\n\nas we have seen.\n\n",
    "code": f'assert START.match("{START}")\nassert "{END}" in text\n\n',
    "about it": "Project Gutenberg was founded in 1971; see www.gutenberg.org.\n\nDistributed Proofreaders, pgdp.net, "
    "have prepared many of its texts. Project Gutenberg's Etexts end with a license.\n\nThe Project Gutenberg License "
    f"follows the line\n{END}\nin every one; its Full License has Sections 1 to 5.\n\n",
}  # fmt: skip


@pytest.mark.parametrize("quote", QUOTES.values(), ids=QUOTES)
def test_a_text_about_project_gutenberg_is_kept_whole_wrapped_or_not(quote: str) -> None:
    titles = ("How Headers Are Removed", "Title: Headers\nAuthor: A. Writer", "Project Gutenberg eBooks")
    long, short = (
        f"{quote}{tale('ALPHA', 30)}{quote}{tale('BETA', 3000)}{quote}THE END",
        f"{tale('ALPHA', 3)}{quote}The end.",
    )
    for text in (f"{title}\n\n{body}\n" for title in titles for body in (long, short)):
        assert unwrap(text.encode()).body.decode() == text
        for head, tail in FORMS.values():
            assert unwrap((head + text + tail).encode()).body.decode().split() == text.split()


@pytest.mark.parametrize("copies", [1, 40])
def test_books_that_were_joined_by_single_blanks_are_kept_and_most_of_their_wrapping_is_not(copies: int) -> None:
    books = [tale(name, 200 * copies) for name in ("ALPHA", "BETA", "GAMMA")]
    for head, tail in (*FORMS.values(), (HEADER, BOTTOM)):
        joined = " ".join("".join(head + book + tail for book in books).split())
        found = unwrap(joined.encode()).body.decode()
        assert all(" ".join(book.split()) in found for book in books)
    found = unwrap(" ".join("".join(FORMS["modern"][0] + b + FORMS["modern"][1] for b in books).split()).encode())
    assert found.body.decode().split() == "".join(books).split()


@pytest.mark.parametrize("paragraphs", [40, 800])
def test_a_text_behind_a_short_footer_is_kept(paragraphs: int) -> None:
    footer = (
        "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\nUpdated editions will replace the previous one.\n\n"
    )
    behind = "".join(f"Another text, which has {n} words or more of its own.\n\n" for n in range(paragraphs))
    for end in (footer, footer.rstrip() + "\n"):
        found = unwrap((HEADS["this"] + tale("ALPHA") + end + behind).encode()).body.decode()
        assert found.split() == (tale("ALPHA") + behind).split()


def test_an_article_that_quotes_a_marker_below_a_field_keeps_what_is_before_it() -> None:
    for opening, between in itertools.product(
        (
            "Michael Hart\n\nLanguage: English\n\n",
            "Language: English\n\n",
            "Release Date: May 9\nLanguage: English\n\n",
        ),
        ("Every file has a line\n", "Every file has a line.\n\n", "A line.\n\n" * 40, f"{tale('ALPHA', 9)}\n\n"),
    ):
        text = f"{opening}{between}{START}\nbefore it begins.\n\n{tale('BETA')}"
        assert unwrap(text.encode()).body.decode() == text
    credits = "Title: A Tale\nLanguage: English\n\nProduced by Some One\n\n[Last updated: May 9, 2009]\n\n"
    assert unwrap(f"{credits}{START}\n\n{tale('BETA')}".encode()).body.decode().split() == tale("BETA").split()
