"""Detects languages and scripts of short texts."""

import pytest

from glm5_jax.envs.instructions.languages import (
    NAMES,
    count_scripts,
    may_be,
    score_languages,
    script,
    scripts_of_language,
    words_of,
)

# Two texts of each language, written for this test: everyday prose without telling names.
TEXTS = {
    "ar": ("ذهبت إلى السوق في الصباح واشتريت الخبز.", "هذا الكتاب جميل جدا ولكن لا أعرف من كتبه."),
    "bg": ("Утре ще отидем на пазар, защото няма хляб.", "Тази книга е много хубава и аз я чета."),
    "bn": ("আমি আজ সকালে বাজারে গিয়েছিলাম।", "বইটি খুব ভালো।"),
    "de": ("Morgen gehen wir auf den Markt, weil das Brot fehlt.", "Dieses Buch ist schön, aber lang."),
    "en": ("Tomorrow we go to the market, for there is no bread.", "This book is good but long."),
    "es": ("Mañana vamos al mercado porque no hay pan.", "Este libro es muy bueno, pero largo."),
    "fa": ("من امروز صبح به بازار رفتم و نان خریدم.", "این کتاب خیلی خوب است اما طولانی است."),
    "fi": ("Huomenna menemme torille, koska leipä on loppu.", "Tämä kirja on hyvä mutta pitkä."),
    "fr": ("Demain nous allons au marché car il n'y a plus de pain.", "Ce livre est beau mais long."),
    "gu": ("હું આજે સવારે બજારમાં ગયો હતો.", "આ પુસ્તક સારું છે."),
    "he": ("מחר נלך לשוק כי אין לחם.", "הספר הזה טוב מאוד."),
    "hi": ("मैं आज सुबह बाज़ार गया था और रोटी लाया।", "यह किताब बहुत अच्छी है, पर लंबी भी है।"),
    "it": ("Domani andiamo al mercato perché non c'è il pane.", "Questo libro è bello ma lungo."),
    "ja": ("明日は市場に行きます。パンがないからです。", "この本はとても良い。"),
    "kn": ("ನಾನು ಇಂದು ಬೆಳಿಗ್ಗೆ ಮಾರುಕಟ್ಟೆಗೆ ಹೋದೆ.", "ಈ ಪುಸ್ತಕ ಚೆನ್ನಾಗಿದೆ."),
    "ko": ("내일 우리는 시장에 갑니다. 빵이 없어요.", "이 책은 정말 좋아요."),
    "ml": ("ഞാൻ ഇന്ന് രാവിലെ ചന്തയിൽ പോയി.", "ഈ പുസ്തകം നല്ലതാണ്."),
    "mr": ("मी आज सकाळी बाजारात गेलो आणि भाकरी आणली.", "हे पुस्तक खूप चांगले आहे."),
    "ne": ("म आज बिहान बजार गएँ र रोटी किनेँ।", "यो किताब धेरै राम्रो छ तर लामो छ।"),
    "pa": ("ਮੈਂ ਅੱਜ ਸਵੇਰੇ ਬਜ਼ਾਰ ਗਿਆ ਸੀ।", "ਇਹ ਕਿਤਾਬ ਚੰਗੀ ਹੈ।"),
    "pl": ("Jutro idziemy na targ, bo nie ma chleba.", "Ta książka jest bardzo dobra, ale długa."),
    "pt": ("Amanhã vamos ao mercado porque não há pão.", "Este livro é muito bom, mas longo."),
    "ru": ("Завтра мы пойдём на рынок, потому что нет хлеба.", "Эта книга очень хорошая, но длинная."),
    "sw": ("Kesho tutakwenda sokoni kwa sababu hakuna mkate.", "Kitabu hiki ni kizuri sana lakini kirefu."),
    "ta": ("நான் இன்று காலை சந்தைக்குச் சென்றேன்.", "இந்தப் புத்தகம் நன்றாக இருக்கிறது."),
    "te": ("నేను ఈ ఉదయం మార్కెట్‌కు వెళ్ళాను.", "ఈ పుస్తకం చాలా బాగుంది."),
    "th": ("พรุ่งนี้เราจะไปตลาดเพราะไม่มีขนมปัง", "หนังสือเล่มนี้ดีมาก"),
    "uk": ("Завтра ми підемо на ринок, бо немає хліба.", "Ця книга дуже гарна, але довга."),
    "ur": ("میں آج صبح بازار گیا تھا اور روٹی لایا۔", "یہ کتاب بہت اچھی ہے لیکن لمبی ہے۔"),
    "vi": ("Ngày mai chúng tôi đi chợ vì không có bánh mì.", "Quyển sách này rất hay nhưng dài."),
    "zh": ("明天我们去市场，因为没有面包。", "这本书非常好。"),
}  # fmt: skip


def test_every_language_has_texts():
    assert set(TEXTS) == set(NAMES)


@pytest.mark.parametrize("code", NAMES)
def test_detects_only_language_of_text(code):
    for text in TEXTS[code]:
        assert [other for other in NAMES if may_be(text, other)] == [code], score_languages(text)


@pytest.mark.parametrize("code", NAMES)
def test_ignores_capitals_and_markup(code):
    text = "# 1.\n" + "\n".join(f"* **{text}** 3/4" for text in TEXTS[code])
    for cased in (text.upper(), text.lower()):
        assert [other for other in NAMES if may_be(cased, other)] == [code]


def test_takes_language_of_most_letters():
    hindi = "यह किताब बहुत अच्छी है और मैं इसे पढ़ता हूँ।"
    assert may_be(f"{hindi} (Mumbai)", "hi")
    assert not may_be(f"Here is what you asked for, as a whole sentence: {hindi}", "hi")


def test_weighs_characters_above_letters():
    assert may_be("この本はFrankensteinという。", "ja") and may_be(
        "이 책은 Frankenstein 입니다.", "ko"
    )
    assert may_be("这家公司叫「味の素」，它生产调味料。", "zh")  # a name in kana


def test_text_without_words_may_be_any_language():
    for text in ("", "3 + 4 = 7", "!!!", "😀"):
        assert score_languages(text) == {} and may_be(text, "en") and may_be(text, "hi")
    assert may_be("Xyz", "en") and may_be("Xyz", "fi") and not may_be("Xyz", "ru")
    assert score_languages("გამარჯობა") == {} and not may_be(
        "გამარჯობა", "en"
    )  # of no language here


def test_rejects_unknown_language():
    with pytest.raises(ValueError, match="language is 'tlh'; use one of en, es"):
        may_be("", "tlh")


def test_finds_scripts_of_letters():
    assert [script(c) for c in "aЖ漢か가هि"] == (
        "LATIN CYRILLIC CJK HIRAGANA HANGUL ARABIC DEVANAGARI".split()
    )
    assert [script(c) for c in "1 .\n😀\u0301\ufe0f"] == [None] * 7
    assert script("Ａ") == script("𝐀") == "LATIN"  # full width, mathematical
    assert count_scripts("Да, ok!") == {"CYRILLIC": 2, "LATIN": 2}
    assert scripts_of_language("ja") == {"CJK", "HIRAGANA", "KATAKANA"} and scripts_of_language(
        "ur"
    ) == {"ARABIC"}
    assert all(scripts_of_language(code) for code in NAMES)


def test_words_keep_combining_signs():
    assert words_of("हिन्दी में।") == ["हिन्दी", "में"]
    assert words_of("Don't 3x cafe\u0301_b") == ["Don", "t", "x", "café", "b"]
