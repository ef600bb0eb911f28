"""alsd_pp and aes_pp: batched beam searches of RNN-T and TDT models [ALSD++/AES++]."""
