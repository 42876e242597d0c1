"""Strings that tokenizers, detokenizers and templates are known to stumble over; the same list on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

FIXED = (
    "",
    " ",
    "  ",
    "   ",
    "a",
    " a",
    "a ",
    "  a",
    "a  ",
    " a ",
    "\n",
    "\n\n",
    "\n\n\n",
    " \n",
    "\n ",
    "\t",
    "\t\t",
    "\r\n",
    "\r\n\r\n",
    "\r",
    "a\nb",
    "a\r\nb",
    "a \n b",
    "x\n\n y",
    "a    b",
    "a" + " " * 40 + "b",
    " " * 70,
    "\n" * 40,
    "\t" * 40,
    "  two",
    "\ta",
    "a\t\tb",
    "Hello world",
    "Hello, world!",
    "hello WORLD HeLLo",
    "it's we're I'LL you'd 'tis don'T",
    "’s ‘quoted’ “double” «guillemets»",
    "0",
    "7",
    "12",
    "123",
    "1234",
    "12345678901234567890",
    "3.14159",
    "1,000,000.50",
    "-17",
    "1e-9",
    "0x1F",
    "١٢٣٤",
    "１２３",
    "Ⅷ ½ ²³",
    "a1b2c3",
    "  1",
    "1  2",
    " 1 2  3   4",
    "2026-11-29T17:43:25Z",
    "café naïve Ünïcödé",
    "cafe\u0301",
    "e\u0301\u0323\u0302",
    "a\u0308 " * 5,
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘",
    "ﬁ ﬂ ﬀ ſ ß ẞ İ ı",
    "😀",
    "😀😀😀",
    "a😀b",
    "👨‍👩‍👧‍👦",
    "👩🏽‍🚀",
    "🏳️‍🌈",
    "🇫🇷🇩🇪🇯🇵",
    "☺️ ☺",
    "1️⃣ #️⃣",
    "🫠🪿🫨",
    "你好，世界！",
    "中文和English混排123",
    "日本語のテキスト、カタカナ。",
    "ｶﾀｶﾅ",
    "한국어 텍스트",
    "ㅎㅏㄴ",
    "ภาษาไทยไม่มีช่องว่าง",
    "ខ្មែរ",
    "हिन्दी में पाठ",
    "தமிழ்",
    "తెలుగు",
    "مرحبا بالعالم",
    "שלום עולם",
    "a\u202eb\u202cc",
    "\u200f\u200ertl",
    "Привет, мир",
    "Ελληνικά",
    "Հայերեն",
    "ქართული",
    "አማርኛ",
    "ᏣᎳᎩ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
    "𠀀𠀁𪛖",
    "𒀀𒁀",
    "\U0001f9d1\u200d\U0001f4bb",
    "\u00a0",
    "a\u00a0b",
    "\u2003em\u2009thin\u3000ideographic",
    "\u200b\u200c\u200d\u2060\ufeff",
    "\ufeffBOM",
    "\x00",
    "a\x00b",
    "\x01\x02\x1b[31m\x7f",
    "\x85\u2028\u2029",
    "\ue000\uf8ff",
    "\U000f0000\U0010fffd",
    "\ufffd",
    "\ufffe\uffff",
    "\U0010ffff",
    "▁",
    "▁▁",
    "a▁b",
    "▁ ▁",
    "Ġ",
    "ĠHello",
    "Ċ",
    "Ã©",
    "<0x0A>",
    "<0xE4><0xBD>",
    "<unk>",
    "</w>",
    "##ing",
    "@@ ",
    "def f(x):\n    return x ** 2  # square\n",
    "if (a&&b) {\n\t\treturn a->b[0];\n}\r\n",
    "for(;;){}",
    "SELECT * FROM t WHERE a='b';--",
    '<div class="x">&amp;</div>',
    "https://example.org/a?b=c&d=%20e#f",
    "user@example.org",
    "C:\\path\\to\\file",
    "\\n \\t \\u00e9",
    "$\\frac{a}{b}$",
    '{"key": [1, 2.5, null, true]}',
    "a=b+c*d/e%f^g|h~i`j",
    "!!!",
    "...",
    "?!?!",
    "----------",
    "==========",
    "******",
    "_____",
    "(((())))",
    "[[[",
    "/**/",
    "#!/bin/sh",
    "a_b_c camelCase PascalCase kebab-case",
    "x" * 300,
    "ab" * 200,
    "é" * 100,
    "漢" * 100,
    "😀" * 40,
    "Donaudampfschifffahrtsgesellschaftskapitänsmütze",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "'",
    '"',
    "''",
    "' s",
    "'S",
    "'ſ",
    "don’t",
    " 's",
    "ll're",
    "\u0130'LL",
    "\u212a",
    "ǅ ǆ Ǆ",
)
SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<think>",
)
_RANGES = (
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x2000, 0x206F),
    (0x2190, 0x27BF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0xE000, 0xE010),
    (0xFE00, 0xFE0F),
    (0xFF01, 0xFF5E),
    (0x1F300, 0x1FAFF),
    (0x1F1E6, 0x1F1FF),
    (0x20000, 0x20100),
    (0x10FF00, 0x10FFFF),
)


def awkward_strings(count: int = 500, specials: Sequence[str] = SPECIALS, seed: int = 20) -> list[str]:
    """`count` different strings: the fixed ones, special tokens in all positions, then random mixtures."""
    found: dict[str, None] = {}
    for text in _all(specials, random.Random(seed)):
        found[text] = None
        if len(found) == count:
            break
    return list(found)


def _all(specials: Sequence[str], source: random.Random) -> Iterator[str]:
    yield from FIXED
    for special in specials:
        yield from (
            special,
            f"a{special}b",
            f" {special} ",
            f"{special}{special}",
            f"{special[:-1]} {special[1:]}",
            f"{special}\n x",
        )
    while True:
        yield source.choice((_from_ranges, _from_pieces, _blanks, _numbers))(specials, source)


def _from_ranges(_: Sequence[str], source: random.Random) -> str:
    ranges = source.choices(_RANGES, k=source.randint(1, 4))
    return "".join(chr(source.randint(*source.choice(ranges))) for _ in range(source.randint(1, 24)))


def _from_pieces(specials: Sequence[str], source: random.Random) -> str:
    pieces = [text[:12] for text in FIXED] + list(specials)
    return "".join(source.choice(pieces) for _ in range(source.randint(2, 6)))


def _blanks(_: Sequence[str], source: random.Random) -> str:
    words = ("a", "the", "I'm", "é", "中", "9", ".", "(", "_", "😀")
    gaps = (" ", "  ", "   ", "\n", "\n\n", "\t", " \n", "\n ", "\r\n", "\u00a0", " " * 17, "")
    return "".join(source.choice(gaps) + source.choice(words) for _ in range(source.randint(2, 10))) + source.choice(gaps)


def _numbers(_: Sequence[str], source: random.Random) -> str:
    signs = ("", " ", "-", "+", "$", ".", ",", "e", "%", "x")
    return "".join(source.choice(signs) + str(source.randrange(10 ** source.randint(1, 9))) for _ in range(source.randint(1, 5)))
