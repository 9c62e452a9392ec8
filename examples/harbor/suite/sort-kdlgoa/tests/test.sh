#!/bin/bash
# 1 for the letters in order, else 0; what the agent has written is in /app/answer.
sorted=$(echo kdlgoa | fold -w1 | sort | tr -d '\n')
[ "$(tr -d '[:space:]' < /app/answer)" = "$sorted" ]
echo $((1 - $?)) > /logs/verifier/reward.txt
