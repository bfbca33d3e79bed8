"""Which script and which language a text is in, told by its letters and its most frequent small words.

No model: a language that has a script of its own is told by that. The others are told apart by words that almost
every sentence of theirs has and by letters and ends of words that their neighbours lack, so that a sentence or two
are enough, and a name or a single word may leave it open.
"""

import collections
import functools
import re
import unicodedata

# The languages of each script, which is called as Unicode's names of its letters begin.
_SCRIPTS = {
    "BENGALI": "bn",
    "GUJARATI": "gu",
    "HANGUL": "ko",
    "HEBREW": "he",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "GURMUKHI": "pa",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
    "ARABIC": "ar fa ur",
    "CYRILLIC": "bg ru uk",
    "DEVANAGARI": "hi mr ne",
    "LATIN": "de en es fi fr it pl pt sw vi",
}

# Of each language that shares its script: letters and ends of words that most others of it lack, and small words.
_MARKED = {
    "ar": "[ةىأإيك]",
    "bg": "ъ|(ите|ата|ото|ния|ане)$",
    "de": "[ßäöü]|sch|(ung|ungen|keit|lich)$",
    "en": "th|(ing|ed|tion|ly)$",
    "es": "ñ|(ción|ciones|dad|ado|ida)$",
    "fa": "",
    "fi": "[äö]|yy|uu|ii|kk|(ssa|ssä|sta|stä|lla|llä|een)$",
    "fr": "[çêèœùû]|(tion|ment|eux|ée)$",
    "hi": "",
    "it": "[ìò]|zz|gli|(zione|ità|ato|ente)$",
    "mr": "ळ|(ाच्या|ाचे|ाची|ांचे|मध्ये|साठी|द्वारे|ण्यात|ेल)",
    "ne": "हरू|(लाई|बाट|को)$",
    "pl": "[ąęłńśźż]|cz|sz|rz",
    "pt": "[ãõ]|lh|nh|(dade|ado|eiro)$",
    "ru": "[ыэё]|(ть|ться|ого|его|ии|ие|ий)$",
    "sw": "",
    "uk": "[іїєґ]",
    "ur": "[ٹڈڑےںہھ]",
    "vi": "[ăđơưạảấầẩậắằặẹẻẽếềểệỉịọỏốồổỗộớờởợụủứừửữựỳỵỷ]",
}
_WORDS = {
    "ar": "في من على إلى أن هذا هذه التي الذي كان عن مع لا ما هو هي و كل بعد قد",
    "bg": "и на да се от за в е с не по че това като са ще той тя към но или при със ми аз съм много",
    "de": "der die das und ist in den von zu mit sich auf für nicht ein eine dem des es im auch als an sie "
    "ich wir er wie bei sind hat oder aber",
    "en": "the of and to in a is that it for on was with as are be at by this i you not have from or we they "
    "he she my your but his her an will can our has do what me so",
    "es": "el la los las de que y en un una es no se por con para su al lo como más pero del yo está muy son "
    "este esta",
    "fa": "و در به از که این را با است برای آن یک خود تا بر هم نیز می شود من او ما یا اما",
    "fi": "ja on ei se että hän oli ovat mutta kun niin myös tai joka minä sinä me he ole olen kuin sen tämä "
    "hyvin nyt mitä voi",
    "fr": "le la les de des et un une est en que qui dans pour pas sur au avec ce il elle nous vous je sont "
    "plus ne du se mais ou",
    "hi": "है हैं में की के का से को और पर यह वह एक ने नहीं भी कि हम मैं था थी थे तो ही कर लिए इस",
    "it": "il la di che e è un una in per non con sono del della i gli le si da al come ma anche più nel lo io "
    "questo questa",
    "mr": "आहे आहेत आणि या हे ही तो ती मी आम्ही नाही होते होता होती च त्या एक व पण तर मध्ये साठी खूप करू ला",
    "ne": "छ छन् र मा को का लाई हो यो त्यो म हामी पनि गर्न एक भने थियो हुन् तर धेरै छैन गर्छ बाट हुन्छ",
    "pl": "i w na z do nie się że jest to jak o po co ale za od przez dla są być czy był był ma tym oraz ja my",
    "pt": "o a os as de que e em um uma é não se por com para do da no na como mais mas ao eu está muito são "
    "dos você",
    "ru": "и в не на я что он с как это по но они мы она к у из за от же вы так для или был очень все его бы",
    "sw": "na ya wa kwa ni katika za la hii cha kama hiyo huo sana yake watu lakini kuwa au pia ili mimi sisi "
    "yangu hii huyo vya si",
    "uk": "і в не на я що він з як це та до але вони ми вона у за від ви для або був дуже всі його є їх про",
    "ur": "ہے ہیں میں کی کے کا سے کو اور پر یہ وہ ایک نے نہیں بھی کہ ہم تھا تھی تو ہی کر لیے اس",
    "vi": "là và của có không được trong một các cho người với đã này để những tôi ở rất từ khi đến bạn chúng",
}
_WORDS = {code: frozenset(words.split()) for code, words in _WORDS.items()}

NAMES = {  # the languages that are told apart, by ISO 639-1
    "en": "English",
    "es": "Spanish",
    "pt": "Portuguese",
    "ar": "Arabic",
    "hi": "Hindi",
    "fr": "French",
    "ru": "Russian",
    "de": "German",
    "ja": "Japanese",
    "it": "Italian",
    "bn": "Bengali",
    "uk": "Ukrainian",
    "th": "Thai",
    "ur": "Urdu",
    "ta": "Tamil",
    "te": "Telugu",
    "bg": "Bulgarian",
    "ko": "Korean",
    "pl": "Polish",
    "he": "Hebrew",
    "fa": "Persian",
    "vi": "Vietnamese",
    "ne": "Nepali",
    "sw": "Swahili",
    "kn": "Kannada",
    "mr": "Marathi",
    "gu": "Gujarati",
    "pa": "Punjabi",
    "ml": "Malayalam",
    "fi": "Finnish",
    "zh": "Chinese",
}
_KANA = ("HIRAGANA", "KATAKANA")
_MARKED = {code: re.compile(marks or "(?!)") for code, marks in _MARKED.items()}
_DENSE = {"CJK": 3, "HANGUL": 2}  # letters of an alphabet that a character is worth
# `\w` leaves out the signs of vowels; the joiner stands within Persian words.
_MARKS = "".join(
    filter(lambda c: unicodedata.category(c)[0] == "M", map(chr, range(0x300, 0x1000)))
)
_WORD = re.compile(rf"(?:[^\W\d_]|[{_MARKS}\u200c])+")


@functools.lru_cache(2**16)
def script(character: str) -> str | None:
    """The script of a letter or of a mark that belongs to one, as Unicode's names begin ("LATIN", "CJK"); None for
    digits, signs and marks that all scripts share. Full-width and mathematical letters count as the plain ones."""
    character = unicodedata.normalize("NFKC", character)[:1]
    if not character or unicodedata.category(character)[0] not in "LM":
        return None
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return None if name in ("COMBINING", "MODIFIER", "VARIATION", "") else name


def scripts(text: str) -> collections.Counter[str]:
    """How many letters of each script a text has."""
    found = collections.Counter()
    for character, count in collections.Counter(text).items():
        if name := script(character):
            found[name] += count
    return found


def scripts_of(code: str) -> frozenset[str]:
    """The scripts that a language of `NAMES` is written in."""
    if code in ("ja", "zh"):
        return frozenset(("CJK", *_KANA) if code == "ja" else ("CJK",))
    return frozenset(name for name, codes in _SCRIPTS.items() if code in codes.split())


def evidence(text: str) -> dict[str, float]:
    """How much of a text speaks for each language that its most frequent script may be of; empty without letters.

    In a script of one language 1. Else the share of its words that are small words of the language, plus the
    share of words that are marked by letters or an end of its own.
    """
    found = scripts(text)
    if not found:
        return {}
    kana = sum(found.pop(name, 0) for name in _KANA)
    found["CJK"] += kana  # which Japanese mixes with characters, more than a tenth of them
    main = max(found, key=lambda name: found[name] * _DENSE.get(name, 1))
    if main == "CJK":
        return {"ja" if 10 * kana >= found["CJK"] else "zh": 1.0}
    codes = _SCRIPTS.get(main, "").split()
    if len(codes) < 2:
        return dict.fromkeys(codes, 1.0)
    words = [word for word in words_of(text.lower()) if script(word[0]) == main]
    if not words:
        return dict.fromkeys(codes, 0.0)
    return {
        code: sum((w in _WORDS[code]) + (_MARKED[code].search(w) is not None) for w in words)
        / len(words)
        for code in codes
    }


def words_of(text: str) -> list[str]:
    """Its runs of letters."""
    return _WORD.findall(unicodedata.normalize("NFC", text))


def may_be(text: str, language: str) -> bool:
    """Whether a text is in a language, as far as can be told: no other language has more evidence. True of a text
    that has no letters, as nothing speaks against it."""
    if language not in NAMES:
        raise ValueError(f"language is {language!r}; use one of {', '.join(NAMES)}")
    found = evidence(text)
    if not found:
        return not scripts(text)
    return found.get(language, -1.0) >= max(found.values())
