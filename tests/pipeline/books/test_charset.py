"""Every character set becomes UTF-8, and what cannot is counted."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.books.charset import is_utf8, to_utf8, undecodable_lines

FRENCH = "Où est l'été? Les élèves français étaient déjà là, « près » de la forêt où naît le cœur.\n" * 30


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
        assert (decoded.text.decode(), decoded.replaced_bytes) == (text, 0)


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
        assert (decoded.text.decode(), decoded.is_guessed) == (text, False), encoding


def test_a_character_set_that_few_letters_tell_is_said_to_be_guessed() -> None:
    letter = "He sent a letter from the harbour road. " * 50
    for encoding in ("cp1252", "cp850"):
        assert to_utf8((letter + "A café in Málaga.").encode(encoding)).is_guessed
    assert not to_utf8(("Character set encoding: CP850\n" + letter + "A café.").encode("cp850")).is_guessed
    assert not to_utf8((letter + "A café.").encode()).is_guessed


def test_a_declared_character_set_is_used() -> None:
    text = "Character set encoding: ISO-8859-5\n\n" + "Война и мир. Князь Андрей.\n"
    assert to_utf8(text.encode("iso-8859-5")).text.decode() == text


def test_the_quotes_of_windows_are_read_also_where_latin_1_is_declared() -> None:
    for declared in ("ISO-8859-1", "ISO Latin-1", "latin1", "Windows-1252"):
        text = f"Character set encoding: {declared}\n\nHe said “café”.\n"
        assert to_utf8(text.encode("cp1252")).text.decode() == text


MIXTURES = {
    "cp1252": "Der Müller lachte, und die Enkelin lief über die Brücke zum Fluß.\n",
    "cp1250": UNDECLARED[CENTRAL][0] + "\n",
    "cp1251": "Старый мельник засмеялся, а внучка побежала к реке. Когда солнце зашло, все сели за длинный стол.\n",
    "koi8_r": "Старый мельник засмеялся, а внучка побежала к реке. Когда солнце зашло, все сели за длинный стол.\n",
    "gb18030": "老磨坊主笑了，孫女跑向河邊。太陽下山以後，大家坐在長桌旁，聽他講從前的故事。\n",
    "big5": "老磨坊主笑了，孫女跑向河邊。太陽下山以後，大家坐在長桌旁，聽他講從前的故事。\n",
    "shift_jis": "メロスは激怒した。必ず、かの邪智暴虐の王を除かなければならぬと決意した。\n",
    "euc_jp": "メロスは激怒した。必ず、かの邪智暴虐の王を除かなければならぬと決意した。\n",
}


@pytest.mark.parametrize("encoding", MIXTURES)
def test_each_line_is_read_in_utf8_or_in_the_other_character_set_of_the_file(encoding: str) -> None:
    text = MIXTURES[encoding]
    for first, utf8, other in itertools.product((FRENCH.splitlines(keepends=True)[0], text), (2, 40), (2, 40)):
        decoded = to_utf8((first * utf8).encode() + (text * other).encode(encoding))
        assert (decoded.text.decode(), decoded.replaced_bytes) == (first * utf8 + text * other, 0)
        assert decoded.encoding.endswith("and utf-8")


def test_few_lines_of_latin_1_in_utf8_are_read_and_pairs_of_it_that_are_utf8_are_not() -> None:
    lines = FRENCH.encode() + "Café in Köln.\n".encode("latin-1") * 2 + FRENCH.encode()
    assert to_utf8(lines).text.decode() == FRENCH + "Café in Köln.\n" * 2 + FRENCH
    for pair in ("Spaß»", "rue Fuß“"):  # which are UTF-8 for a letter of another script
        text = MIXTURES["cp1252"] * 9 + f"Ein {pair}, rief er.\n"
        assert to_utf8(text.encode("cp1252")).text.decode() == text


def test_single_bytes_of_windows_in_a_line_of_utf8_are_read_where_they_fit_and_damage_is_not() -> None:
    pasted = "Où est l’été? ".encode() * 20 + b"\x93Yes,\x94 he said, \x93I don\x92t know.\x94\n"
    decoded = to_utf8(pasted)
    assert decoded.text.decode() == "Où est l’été? " * 20 + "“Yes,” he said, “I don’t know.”\n"
    assert (decoded.encoding, decoded.replaced_bytes) == ("cp1252 and utf-8", 0)
    cut = "Où est l’été? ".encode() * 20 + b"caf\xc3 and don\xe2\x80t \xf0\x9f\x98 and\xff\n"
    decoded = to_utf8(cut)
    assert (decoded.encoding, decoded.replaced_bytes) == ("utf-8", 1 + 2 + 3 + 1)


@pytest.mark.parametrize("declared", ["cp437", "cp850", "UTF-8", "US-ASCII", "windows-1251", "Big5", "Shift_JIS"])
def test_a_declared_character_set_that_the_bytes_contradict_is_not_used_and_named(declared: str) -> None:
    for encoding in ("cp1252", "koi8_r", "euc_jp"):
        text = f"Title: Pages\n\nCharacter set encoding: {declared}\n\n" + MIXTURES[encoding] * 9
        decoded = to_utf8(text.encode(encoding))
        assert (decoded.text.decode(), decoded.contradicted_encoding) == (text, declared), encoding


def test_a_character_set_that_a_text_mentions_is_not_declared() -> None:
    text = "The old headers said\n\nCharacter set encoding: ISO-8859-2\n\n" + FRENCH.replace("œ", "oe")
    decoded = to_utf8(text.encode("latin-1"))
    assert (decoded.text.decode(), decoded.contradicted_encoding) == (text, None)


def test_a_short_text_is_read_as_the_rest_of_its_file() -> None:
    lines = "Žluťoučký kůň úpěl ďábelské ódy, řekl starý mlynář a vnučka se hlasitě zasmála.\n" * 9
    sample = undecodable_lines(lines.encode("cp1250"))
    decoded = to_utf8("Kůň.".encode("cp1250"), declared="utf-8", sample=lambda: sample)
    assert (decoded.text.decode(), decoded.is_guessed, decoded.contradicted_encoding) == ("Kůň.", False, None)


def test_a_byte_that_makes_no_word_in_any_character_set_is_not_understood() -> None:
    for text in (b"It went on \xff and on.", b"Character set encoding: US-ASCII\n\nIt went on \xff and on."):
        decoded = to_utf8(text)
        assert (decoded.text.decode(), decoded.replaced_bytes, decoded.is_guessed) == (
            text.decode("utf-8", "replace"),
            1,
            False,
        )


def test_a_single_byte_is_damage_where_the_format_says_utf8() -> None:
    assert to_utf8(b"It go\xe9s on.", declared="utf-8").replaced_bytes == 1
    decoded = to_utf8(b"A caf\xe9 in M\xe1laga.", declared="utf-8")
    assert (decoded.text.decode(), decoded.is_guessed, decoded.replaced_bytes) == ("A café in Málaga.", True, 0)


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
        assert (decoded.encoding, decoded.replaced_bytes) == ("utf-8", few)
        assert decoded.text.decode().replace("\ufffd", "") == damaged.replace(b"\xff", b"").decode()


def test_the_character_set_is_detected_where_the_letters_are() -> None:
    front = "It was a quiet morning on the harbour road, and the captain wrote a letter home.\n" * 500
    text = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.\n" * 300
    assert to_utf8((front + text).encode("cp1251")).text.decode() == front + text
