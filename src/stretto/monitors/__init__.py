"""Where metrics are written: always to `metrics.jsonl`, and to trackers that are configured."""
