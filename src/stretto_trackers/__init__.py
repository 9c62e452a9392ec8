"""Programs that show metrics: W&B, TensorBoard, trackio, MLflow, SwanLab."""
