"""Checkpoints of Megatron, to and from Hugging Face's names; and networks of Megatron-Core, for the trainer."""

SUMMARIES = {
    "convert": "a checkpoint of Megatron as a Hugging Face directory, or the other way: stretto convert FROM TO"
}
