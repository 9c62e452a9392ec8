"""Rows and rewards."""

import random


def rows(first, last):
    rng = random.Random(0)
    words = sorted({"".join(rng.sample("abcdefghij", 4)) for _ in range(2000)})
    rng.shuffle(words)
    return [
        {"prompt": [{"role": "user", "content": word}], "answer": "".join(sorted(word))} for word in words[first:last]
    ]


def is_right(completions, answer, **kwargs):
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer)]


def places(completions, answer, **kwargs):
    texts = [c[0]["content"].strip() for c in completions]
    return [sum(x == y for x, y in zip(t, a)) / max(len(t), len(a)) for t, a in zip(texts, answer)]


def length_is_four(prompts, completions, **kwargs):
    return [float(len(c[0]["content"].strip()) == 4) for c in completions]
