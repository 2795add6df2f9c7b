#!/bin/sh
# A shell script between the command and the training, as schedulers like it.
set -e
cd "$(dirname "$0")"
python plain.py
echo "after the training"
