"""Tables on a terminal."""

from nemo_gpu_decoding.report import format_table


def test_numbers_are_aligned_right_and_text_left():
    assert format_table(["decoder", "WER"], [["greedy", 14.4], ["beam", ""], ["beam", "7.0"]]) == (
        "decoder   WER\n-------  ----\ngreedy   14.4\nbeam\nbeam      7.0"
    )


def test_a_table_without_rows_is_its_header():
    assert format_table(["a", "bc"], []) == "a  bc\n-  --"
