//! Conversion items of the launch that converts and multiplies: which tokens a stage holds, where a token lies in it, who takes which row.

/// How the gradients of a sequence's tokens lie in a stage: `[tensors][num_heads][tokens][head_dim]` of fp32, as the boxes of the tensor maps
/// bring them. A piece is 16 bytes, 4 elements.
#[derive(Clone, Copy, Debug)]
pub struct StageLayout {
    /// Tensors: dQ, or dK and dV.
    pub tensors: u32,
    /// Heads of a tensor.
    pub num_heads: u32,
    /// Heads that are summed to one of the converted row.
    pub groups: u32,
    /// log2 of the pieces of a head.
    pub head_shift: u32,
    /// Tokens of a stage.
    pub tokens: u32,
}

impl StageLayout {
    /// Bytes of a head: of all its tokens.
    #[inline(always)]
    pub const fn head_bytes(&self) -> u32 {
        self.tokens << (self.head_shift + 4)
    }

    /// Bytes of a tensor.
    #[inline(always)]
    pub const fn box_bytes(&self) -> u32 {
        self.num_heads * self.head_bytes()
    }

    /// Byte offset of the token in `slot`, from that in slot 0, inside each head.
    #[inline(always)]
    pub const fn slot_bytes(&self, slot: u32) -> u32 {
        slot << (self.head_shift + 4)
    }

    /// Byte offset of a piece of the converted row: in the first head of its group, slot 0.
    #[inline(always)]
    pub const fn piece_bytes(&self, piece: u32) -> u32 {
        let source_pieces = (self.num_heads / self.groups) << self.head_shift;
        let second = piece >= source_pieces;
        let piece = piece - if second { source_pieces } else { 0 };
        let head = (piece >> self.head_shift) * self.groups;
        let inside = piece & ((1 << self.head_shift) - 1);
        (if second { self.box_bytes() } else { 0 }) + head * self.head_bytes() + inside * 16
    }
}

/// Walk over the tokens of an item, a stage at a time: a stage's tokens are of one batch.
#[derive(Clone, Copy, Debug)]
pub struct Stages {
    /// First token of the stage at hand.
    pub row: u32,
    /// The item's last token, and one.
    pub end: u32,
    /// Batch of `row`.
    pub batch: u32,
    /// Place of `row` in its sequence.
    pub place: u32,
    seq_len: u32,
    per_stage: u32,
}

impl Stages {
    /// Tokens `first..first + rows` of sequences of `seq_len` (not 0) tokens, up to `per_stage` a stage.
    #[inline(always)]
    pub const fn new(seq_len: u32, per_stage: u32, first: u32, rows: u32) -> Self {
        let batch = first / seq_len;
        Stages { row: first, end: first + rows, batch, place: first - batch * seq_len, seq_len, per_stage }
    }

    /// Tokens of the stage at hand.
    #[inline(always)]
    pub fn tokens(&self) -> u32 {
        self.per_stage.min(self.end - self.row).min(self.seq_len - self.place)
    }

    /// Goes past them.
    #[inline(always)]
    pub fn advance(&mut self, tokens: u32) {
        self.row += tokens;
        self.place += tokens;
        if self.place == self.seq_len {
            self.place = 0;
            self.batch += 1;
        }
    }
}

/// First slot, of a stage that begins with the item's token `index`, that consumer warpgroup `warpgroup` takes; then every second one.
#[inline(always)]
pub const fn first_slot(index: u32, warpgroup: u32) -> u32 {
    (index + warpgroup) & 1
}

/// Rows of an item that a consumer warpgroup takes: every second one.
#[inline(always)]
pub const fn rows_of(rows: u32, warpgroup: u32) -> u32 {
    (rows + 1 - warpgroup) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_cover_an_item_in_order_and_stay_in_a_batch() {
        for seq_len in 1..12 {
            for per_stage in 1..5 {
                for (first, rows) in (0..14).flat_map(|first| (1..20).map(move |rows| (first, rows))) {
                    let mut stages = Stages::new(seq_len, per_stage, first, rows);
                    let mut row = first;
                    while stages.row < stages.end {
                        let tokens = stages.tokens();
                        assert!(stages.row == row && (1..=per_stage).contains(&tokens));
                        assert_eq!((stages.batch, stages.place), (row / seq_len, row % seq_len));
                        assert_eq!((row + tokens - 1) / seq_len, stages.batch);
                        row += tokens;
                        stages.advance(tokens);
                    }
                    assert_eq!(row, first + rows);
                }
            }
        }
    }

    #[test]
    fn each_token_has_one_warpgroup_and_each_warpgroup_the_tokens_it_counts() {
        for per_stage in 1..4 {
            for (seq_len, rows) in (1..9).flat_map(|seq_len| (1..33).map(move |rows| (seq_len, rows))) {
                let mut taken = [0; 2];
                let mut stages = Stages::new(seq_len, per_stage, 0, rows);
                let mut index = 0;
                while stages.row < stages.end {
                    let tokens = stages.tokens();
                    for slot in 0..tokens {
                        let takers = [0, 1]
                            .map(|w| slot >= first_slot(index, w) && (slot - first_slot(index, w)).is_multiple_of(2));
                        assert!(takers[0] != takers[1]);
                        taken[takers[1] as usize] += 1;
                    }
                    stages.advance(tokens);
                    index += tokens;
                }
                assert_eq!(taken, [rows_of(rows, 0), rows_of(rows, 1)]);
            }
        }
    }

    #[test]
    fn pieces_are_found_where_the_boxes_put_them() {
        let layouts = [(1, 16, 1, 256, 2), (2, 16, 4, 256, 1), (2, 8, 4, 64, 3), (1, 4, 1, 128, 8), (2, 6, 2, 64, 2)];
        for (tensors, num_heads, groups, head_dim, tokens) in layouts {
            let head_shift = u32::trailing_zeros(head_dim / 4);
            let layout = StageLayout { tensors, num_heads, groups, head_shift, tokens };
            let kv_heads = num_heads / groups;
            for (tensor, head, slot) in
                (0..tensors * kv_heads * tokens).map(|i| (i / tokens / kv_heads, i / tokens % kv_heads, i % tokens))
            {
                for (group, column) in (0..groups).flat_map(|g| (0..head_dim).step_by(4).map(move |c| (g, c))) {
                    let piece = ((tensor * kv_heads + head) * head_dim + column) / 4;
                    let found = layout.piece_bytes(piece) + layout.slot_bytes(slot) + group * layout.head_bytes();
                    let source_head = tensor * num_heads + head * groups + group;
                    assert_eq!(found, 4 * ((source_head * tokens + slot) * head_dim + column));
                }
            }
            assert_eq!(tensors * layout.box_bytes(), 4 * tensors * num_heads * tokens * head_dim);
        }
    }
}
