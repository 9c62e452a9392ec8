"""The reward functions of letters.py in the form that a file names: one sample each."""


def is_right(args, sample):
    return float(sample.response.strip() == sample.label)


def places(args, sample):
    text = sample.response.strip()
    return sum(x == y for x, y in zip(text, sample.label)) / max(len(text), len(sample.label))


def length_is_four(args, sample):
    return float(len(sample.response.strip()) == 4)
