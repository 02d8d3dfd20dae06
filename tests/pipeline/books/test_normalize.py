"""Encodings and line ends are unified, and no visible character is lost."""

import itertools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.books.normalize import count_characters, is_utf8, join_lines, normalize, to_utf8, trim

LETTERS = st.characters(exclude_categories=["Cs", "Cc", "Cf"])
FRENCH = "Où est l'été? Les élèves français étaient déjà là, « près » de la forêt où naît le cœur.\n" * 30


@settings(max_examples=500)
@given(st.lists(st.text(LETTERS)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_line_ends_are_unified_and_lines_kept(lines: list[str], end: str) -> None:
    assert normalize(end.join(lines).encode()).decode() == "\n".join(lines)


@settings(max_examples=500)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_only_control_characters_and_soft_hyphens_are_removed(text: str) -> None:
    cleaned = normalize(text.encode()).decode()
    assert not [c for c in cleaned if unicodedata.category(c) == "Cc" and c not in "\t\n"]
    visible = [c for c in text if unicodedata.category(c) != "Cc" and c not in "\u00ad\ufeff"]
    assert [c for c in cleaned if c not in "\t\n"] == [c for c in visible if c not in "\t\n"]
    assert normalize(cleaned.encode()).decode() == cleaned
    assert count_characters(cleaned.encode()) == len(cleaned)


@given(st.text(" \n\tab"))
def test_blank_ends_become_one_line_end(text: str) -> None:
    assert trim(text.encode()).decode() == (text.strip() + "\n" if text.strip() else "")


@given(st.binary())
def test_utf8_is_recognized_as_by_python(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        assert not is_utf8(data)
    else:
        assert is_utf8(data)


@settings(max_examples=500)
@given(st.binary())
def test_any_bytes_become_utf8(data: bytes) -> None:
    assert is_utf8(to_utf8(data).text)


def test_encodings_are_found() -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252", "iso-8859-15"):
        text = FRENCH.replace("œ", "oe") if encoding == "iso-8859-15" else FRENCH
        decoded = to_utf8(text.encode(encoding))
        assert (decoded.text.decode(), decoded.replaced) == (text, 0)


WESTERN, CENTRAL = ("cp1252", "iso8859_15", "cp850", "mac_roman"), ("cp1250", "iso8859_2", "cp852", "mac_latin2")
UNDECLARED = {
    WESTERN: (
        "Le vieux meunier éclata de rire et la fillette courut vers la rivière. Après le coucher du soleil, tout le "
        "monde s'assit à la longue table pour écouter les récits d'autrefois, où il était question de fées très âgées.",
        "Der alte Müller lachte, und die Enkelin lief über die Brücke zum Fluß. Später saßen alle am großen Tisch und "
        "hörten Märchen von Königen, Zwergen und schönen Mädchen, die niemals müde wurden.",
        "El viejo molinero se echó a reír y la niña corrió hacia el río. Después, todos se sentaron a la mesa y "
        "escucharon cuentos de años lejanos, de reyes, dragones y mágicos árboles que hablaban mañana y noche.",
        "O velho moleiro começou a rir e a menina correu até à ponte. Depois ninguém se levantou da mesa: as histórias "
        "de outros séculos não acabavam, e os corações das crianças não queriam dormir.",
        "Den gamle mjölnaren skrattade och flickan sprang över bron till ån. När solen hade gått ner satte sig alla "
        "vid det långa bordet för att höra sägner om kungar, höga träd och små väsen.",
    ),
    CENTRAL: (
        "Zażółć gęślą jaźń, powiedział stary młynarz, a wnuczka roześmiała się głośno i pobiegła nad rzekę. Później "
        "wszyscy usiedli przy długim stole i słuchali opowieści o królach, żołnierzach i mądrych wróżkach.",
        "Příliš žluťoučký kůň úpěl ďábelské ódy, řekl starý mlynář a vnučka se hlasitě zasmála. Později všichni usedli "
        "k dlouhému stolu a poslouchali vyprávění o dávných časech, o králích a vojácích.",
        "Az öreg molnár nevetett, az unokája pedig lefutott a folyóhoz. Később mindnyájan leültek a hosszú asztalhoz, "
        "és régi történeteket hallgattak királyokról, hősökről, bölcs tündérekről és gyönyörű nőkről.",
    ),
    ("cp1254", "iso8859_9", "cp857", "mac_turkish"): (
        "Yaşlı değirmenci güldü, torunu da ırmağa doğru koştu. Güneş batınca herkes uzun masanın çevresine oturdu ve "
        "eski günlerin öykülerini, padişahları, askerleri, bilge kadınları dinledi.",
    ),
    ("cp1251", "koi8_r", "iso8859_5", "cp866", "mac_cyrillic"): (
        "Старый мельник засмеялся, а внучка побежала к реке. Когда солнце зашло, все сели за длинный стол и слушали "
        "рассказы о давних временах, о царях, солдатах и мудрых женщинах.",
    ),
    ("cp1253", "iso8859_7", "cp737", "mac_greek"): (
        "Ο γέρος μυλωνάς γέλασε και η εγγονή έτρεξε στο ποτάμι. Όταν έδυσε ο ήλιος, όλοι κάθισαν στο μακρύ τραπέζι και "
        "άκουσαν ιστορίες για παλιούς καιρούς, για βασιλιάδες και στρατιώτες.",
    ),
}


@pytest.mark.parametrize("encodings", UNDECLARED, ids=lambda encodings: encodings[0])
def test_an_undeclared_character_set_is_told_by_the_language(encodings: tuple[str, ...]) -> None:
    for encoding, text in itertools.product(encodings, UNDECLARED[encodings]):
        decoded = to_utf8(text.encode(encoding))
        assert (decoded.text.decode(), decoded.guessed) == (text, False), encoding


def test_a_character_set_that_few_letters_tell_is_said_to_be_guessed() -> None:
    letter = "He sent a letter from the harbour road. " * 50
    for encoding in ("cp1252", "cp850"):
        assert to_utf8((letter + "A café in Málaga.").encode(encoding)).guessed
    assert not to_utf8(("Character set encoding: CP850\n" + letter + "A café.").encode("cp850")).guessed
    assert not to_utf8((letter + "A café.").encode()).guessed


def test_a_declared_character_set_is_used() -> None:
    text = "Character set encoding: ISO-8859-5\n\n" + "Война и мир. Князь Андрей.\n"
    assert to_utf8(text.encode("iso-8859-5")).text.decode() == text


def test_the_quotes_of_windows_are_read_also_where_latin_1_is_declared() -> None:
    for declared in ("ISO-8859-1", "ISO Latin-1", "latin1", "Windows-1252"):
        text = f"Character set encoding: {declared}\n\nHe said “café”.\n"
        assert to_utf8(text.encode("cp1252")).text.decode() == text


@pytest.mark.parametrize(("invalid", "pairs"), [(2, 9), (1, 2), (1, 1)])
def test_with_a_tenth_to_a_third_invalid_utf8_the_declared_character_set_is_used(invalid: int, pairs: int) -> None:
    lines = "Â£5\n" * pairs + "Là-bas.\n" * invalid  # of which the pairs are UTF-8 as well
    text = "Character set encoding: ISO-8859-1\n\n" + lines * 20
    decoded = to_utf8(text.encode("latin-1"))
    assert (decoded.text.decode(), decoded.encoding, decoded.replaced) == (text, "cp1252", 0)


def test_an_unknown_declared_character_set_is_ignored() -> None:
    """Also one that Python has a codec for, which makes no text of bytes or may run long."""
    for declared in ("hex", "base64", "rot13", "zlib", "undefined", "idna", "punycode", "unicode_escape", "none"):
        text = f"Character set encoding: {declared}\n\n" + FRENCH
        assert to_utf8(text.encode("cp1252")).text.decode() == text


@pytest.mark.parametrize(
    ("mark", "encoding"), [(b"\xff\xfe\0\0", "utf-32-le"), (b"\0\0\xfe\xff", "utf-32-be"), (b"\xfe\xff", "utf-16-be")]
)
def test_byte_order_marks_decide_the_encoding(mark: bytes, encoding: str) -> None:
    decoded = to_utf8(mark + FRENCH.encode(encoding))
    assert (decoded.text.decode(), decoded.encoding) == (FRENCH, encoding)


def test_a_few_damaged_bytes_are_replaced_and_counted() -> None:
    for few in (1, 30):
        damaged = b"Character set encoding: ISO-8859-1\n\n" + FRENCH.encode()[:-2] + b"\xff\n" * few
        decoded = to_utf8(damaged)
        assert (decoded.encoding, decoded.replaced) == ("utf-8", few)
        assert decoded.text.decode().replace("\ufffd", "") == damaged.replace(b"\xff", b"").decode()


def test_wrapped_prose_is_joined_and_verse_kept() -> None:
    prose = "It was a bright cold day in April, and the clocks were\nstriking thirteen.\n\nNext.\n"
    verse = "Tiger, tiger, burning bright\nIn the forests of the night\n"
    assert join_lines(prose.encode()).decode() == prose.replace("were\nstriking", "were striking")
    assert join_lines(verse.encode()).decode() == verse


def test_the_character_set_is_detected_where_the_letters_are() -> None:
    front = "It was a quiet morning on the harbour road, and the captain wrote a letter home.\n" * 500
    text = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.\n" * 300
    assert to_utf8((front + text).encode("cp1251")).text.decode() == front + text


def test_mixed_line_ends_are_unified() -> None:
    assert normalize(b"a\r\nb\rc\nd\x0be\x0cf\r\r\ng") == b"a\nb\nc\nd\ne\nf\n\ng"


def test_lists_quotations_and_tables_are_not_joined() -> None:
    for second in ("- an item", "* a star", "  indented", "[a note", "| a cell", "= a sum", "+ more"):
        text = f"It was a bright cold day in April, and the clocks were\n{second}\n"
        assert join_lines(text.encode()).decode() == text
