"""What takes attention's place in a block, or chooses its keys; and the states that recurrent mixers carry."""
