"""Identifies the script and the language of a text, from its letters and most frequent small words.

It needs no model. A language with a script of its own is identified by the script. Others are identified by
words that occur in almost every sentence, and by letters and word endings that related languages lack. One
or two sentences are enough; a name or a single word may leave the language open.
"""

import collections
import functools
import re
import unicodedata

# Script -> its languages. A script is named by the first word of Unicode's names of its letters.
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

# Language that shares its script -> letters and word endings that most others of the script lack.
_MARK_PATTERNS = {
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
# Language that shares its script -> its most frequent small words.
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

NAMES = {  # the languages that are distinguished, by ISO 639-1 code
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
_MARKED = {code: re.compile(marks or "(?!)") for code, marks in _MARK_PATTERNS.items()}
_DENSE = {"CJK": 3, "HANGUL": 2}  # number of letters of an alphabet that a character counts for
# `\w` does not match vowel signs; the zero-width non-joiner occurs inside Persian words.
_MARKS = "".join(
    filter(lambda c: unicodedata.category(c)[0] == "M", map(chr, range(0x300, 0x1000)))
)
_WORD = re.compile(rf"(?:[^\W\d_]|[{_MARKS}\u200c])+")


@functools.lru_cache(2**16)
def script(character: str) -> str | None:
    """Returns the script of a character by the first word of its Unicode name ("LATIN", "CJK").

    Returns None for digits, signs, and marks that all scripts share; a mark of one script has that script.
    Full-width and mathematical letters count as plain ones.
    """
    character = unicodedata.normalize("NFKC", character)[:1]
    if not character or unicodedata.category(character)[0] not in "LM":
        return None
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return None if name in ("COMBINING", "MODIFIER", "VARIATION", "") else name


def count_scripts(text: str) -> collections.Counter[str]:
    """Returns the number of letters of each script in a text."""
    counts = collections.Counter()
    for character, count in collections.Counter(text).items():
        if name := script(character):
            counts[name] += count
    return counts


def scripts_of_language(code: str) -> frozenset[str]:
    """Returns the scripts that a language of `NAMES` is written in."""
    if code in ("ja", "zh"):
        return frozenset(("CJK", *_KANA) if code == "ja" else ("CJK",))
    return frozenset(name for name, codes in _SCRIPTS.items() if code in codes.split())


def score_languages(text: str) -> dict[str, float]:
    """Returns a score for each language of the most frequent script of a text; empty without letters.

    In a script of one language the score is 1. Otherwise it is the share of the words that are small words
    of the language, plus the share of words with letters or an ending that mark it.
    """
    counts = count_scripts(text)
    if not counts:
        return {}
    kana = sum(counts.pop(name, 0) for name in _KANA)
    counts["CJK"] += kana  # Japanese mixes kana with characters; more than a tenth are kana
    main = max(counts, key=lambda name: counts[name] * _DENSE.get(name, 1))
    if main == "CJK":
        return {"ja" if 10 * kana >= counts["CJK"] else "zh": 1.0}
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
    """Returns the runs of letters of a text."""
    return _WORD.findall(unicodedata.normalize("NFC", text))


def may_be(text: str, language: str) -> bool:
    """Returns whether no other language has more evidence in a text than `language`; True for a text without letters.

    Raises ValueError for an unknown language.
    """
    if language not in NAMES:
        raise ValueError(f"language is {language!r}; use one of {', '.join(NAMES)}")
    scores = score_languages(text)
    if not scores:
        return not count_scripts(text)
    return scores.get(language, -1.0) >= max(scores.values())
