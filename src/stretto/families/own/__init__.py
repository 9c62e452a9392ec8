"""The families that our decoder supports (impl = "custom"): every `Family` in a file of this folder is one."""
