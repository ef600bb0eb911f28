#!/bin/sh
# Aliases of the listed names: what a model hears when voices that neither dev nor test has speak them.
#
#     sh assets/self/recipe/aliases.sh MODEL STRATEGY OUT

speak="'espeak-ng -v en-us+m1 -w {wav} {text}'"
for voice in en-gb+f2 en-us+f5 en-gb-x-rp+m3 en-us-nyc+m7 en-us+iven en-gb+m6 en-us+f1 en-us+m2 en-gb+m4; do
    speak="$speak,'espeak-ng -v $voice -w {wav} {text}'"
done
doctor="'remind me to call doctor PHRASE about the confidential draft'"
tell="'tell PHRASE that the heating makes a strange noise'"
chapter="'chapter nine of the design document mentions PHRASE and teresa'"
cd "$(dirname "$0")/.." || exit 1
nemo-gpu-decoding aliases model="models/$1.nemo" strategy="$2" phrases=phrases.txt command="[$speak]" \
    sentences="[$doctor,$tell,$chapter]" texts=lm/lm_train.txt n_best=2 most=8 out="$3"
