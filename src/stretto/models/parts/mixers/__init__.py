"""Mixers other than attention, the choice of attention's keys, and the states of recurrent mixers."""
