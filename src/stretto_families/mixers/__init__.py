"""Mixers other than attention, the choice of its keys, and states of recurrent mixers."""
