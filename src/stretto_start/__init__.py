"""The first hour: an example that trains on a laptop, a project of one's own, and a talk to what was trained."""

SUMMARIES = {
    "demo": "warm a tiny model up and train it, in a few minutes on a laptop",
    "chat": "talk to a checkpoint, a model or a server: stretto chat RUN",
    "init": "write a small project of your own: stretto init DIR",
}
MEANT = {"new": "init", "talk": "chat", "generate": "chat"}
