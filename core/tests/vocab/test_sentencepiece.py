from __future__ import annotations

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from genlm.core.vocab import Vocabulary, decode_vocab

KINDS = sentencepiece_model_pb2.ModelProto.SentencePiece


def expected_bytes(piece) -> bytes:
    """From the model file, not from the processor."""
    if piece.type == KINDS.BYTE:
        return bytes.fromhex(piece.piece[3:5])
    if piece.type in (KINDS.CONTROL, KINDS.UNKNOWN):
        return piece.piece.encode()
    return piece.piece.replace("▁", " ").encode()


def test_every_piece_is_what_the_model_file_says(sentencepiece_file):
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_file.read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    byte_vocab, _ = decode_vocab(processor)
    assert [bytes(token) for token in byte_vocab] == [expected_bytes(p) for p in model.pieces]
    kinds = {piece.type for piece in model.pieces}
    assert kinds >= {KINDS.BYTE, KINDS.CONTROL, KINDS.UNKNOWN, KINDS.USER_DEFINED, KINDS.NORMAL}


def test_the_tokens_of_a_text_join_to_it(sentencepiece_file):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    byte_vocab, _ = decode_vocab(processor)
    for text in ["The fox  and <sep>", "naïve € 日本語🙂\n\t", "<0x41> <s>"]:
        joined = b"".join([byte_vocab[token_id] for token_id in processor.encode(text)])
        # The model puts a space before every text.
        assert joined.decode() == f" {text}"


def test_a_user_defined_symbol_that_looks_like_a_byte_piece_is_its_text(tmp_path):
    prefix = tmp_path / "literal"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b ab"] * 5),
        model_prefix=str(prefix),
        vocab_size=20,
        hard_vocab_limit=False,
        model_type="bpe",
        user_defined_symbols=["<0x41>"],
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    byte_vocab, _ = decode_vocab(processor)
    assert byte_vocab[processor.piece_to_id("<0x41>")].byte_string == b"<0x41>"


def test_the_ids_of_begin_and_end_are_those_of_the_processor(sentencepiece_file):
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_file.read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    vocabulary = Vocabulary.from_tokenizer(processor)
    assert model.pieces[vocabulary.bos_token_id].piece == "<s>"
    assert model.pieces[vocabulary.eos_token_id].piece == "</s>"
    model.trainer_spec.eos_id, model.trainer_spec.bos_id = -1, -1
    del model.pieces[1:3]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    vocabulary = Vocabulary.from_tokenizer(processor)
    assert vocabulary.bos_token_id is None
    assert vocabulary.eos_token_id is None
