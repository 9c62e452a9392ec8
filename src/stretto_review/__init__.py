"""What a run has kept, used after it: judged by other rewards, compared with another run, written for training."""

SUMMARIES = {
    "rescore": "judge the rollouts of a run by another reward: stretto rescore RUN --reward my:fn",
    "export": "rollouts of a run as data for SFT and preferences: stretto export RUN --kind best",
    "diff": "where two runs begin to differ, and in what: stretto diff RUN OTHER",
    "replay": "play a run again, and compare: stretto replay RUN [--from N] [--steps M]",
    "bisect": "the commit or change that makes a step differ: stretto bisect STEP.bundle --commits GOOD..BAD",
}
MEANT = {"rejudge": "rescore", "regrade": "rescore", "compare": "diff"}
