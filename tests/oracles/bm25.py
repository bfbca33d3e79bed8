"""Okapi BM25 per term (Robertson and Zaragoza 2009, 3.4), with 1 added in the logarithm to keep it positive."""

import numpy as np


def bm25(texts, query, k1, b):
    """Scores of texts, lists of words, for a query's words: float64[texts]."""
    num = len(texts)
    mean = np.mean([len(text) for text in texts])
    scores = np.zeros(num, np.float64)
    for word in query:
        having = sum(word in text for text in texts)
        idf = np.log(1 + (num - having + 0.5) / (having + 0.5))
        for i, text in enumerate(texts):
            count = text.count(word)
            if count == 0:
                continue  # 0 / 0 without k1
            scores[i] += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * len(text) / mean))
    return scores
