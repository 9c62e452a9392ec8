"""The contents of a run's directory: as rows for scripts, as text in a terminal, as a page in a browser."""

SUMMARIES = {
    "runs": "list runs with how far they are: stretto runs [DIR ...]",
    "show": "how a run went: stretto show RUN",
    "rollouts": "print rollouts of a run: stretto rollouts RUN --worst 3",
    "plot": "draw metrics of runs: stretto plot RUN [RUN ...] --key entropy/mean",
    "view": "show runs in a browser, live or finished: stretto view [RUN ...]",
    "push": "upload a run's weights and a model card to the Hub: stretto push RUN",
}
MEANT = {"list": "runs", "ls": "runs", "ps": "runs", "dashboard": "view", "ui": "view", "upload": "push"}
