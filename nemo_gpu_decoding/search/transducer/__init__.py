"""Decode RNN-T and TDT models by batched beam searches, alsd_pp and aes_pp [ALSD++/AES++]."""
