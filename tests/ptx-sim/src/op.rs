//! Decoded instructions.
//!
//! A warp has three register files: *words* (`[u32; 32]`, one value a lane; 32-bit, 16-bit and 8-bit registers, the narrow ones
//! zero-extended), *longs* (`[u64; 32]`) and *predicates* (`u32`, one bit a lane). Operands are indices into them: immediates, symbols
//! and special registers are registers that are filled before the warp starts. Arithmetic is a pointer to a function over all 32 lanes.

use crate::error::Space;
use crate::hopper::Hopper;

/// One value a lane, 32 bits.
pub(crate) type Words = [u32; 32];
/// One value a lane, 64 bits.
pub(crate) type Longs = [u64; 32];
/// Index into a register file.
pub(crate) type Reg = u32;
/// Mask of a whole warp.
pub(crate) const FULL: u32 = u32::MAX;

/// A predicate operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predicate {
    pub index: Reg,
    pub negated: bool,
}

/// How a comparison's result is combined with a further predicate.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

impl Logic {
    pub fn apply(self, a: u32, b: u32) -> u32 {
        match self {
            Logic::And => a & b,
            Logic::Or => a | b,
            Logic::Xor => a ^ b,
        }
    }
}

/// A register of either general file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    Word(Reg),
    Long(Reg),
}

/// An address operand: base register and byte offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub base: Data,
    pub offset: i64,
}

/// Element type of a load or store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    /// Bytes: 1, 2, 4 or 8.
    pub bytes: u32,
    /// Whether a load extends the sign.
    pub signed: bool,
}

/// A load or a store.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub space: Space,
    pub element: Element,
    /// Registers, with the bits that a load may fill of each (16, 32, 64).
    pub registers: Vec<(Data, u32)>,
    pub address: Address,
    /// volatile, relaxed, acquire or release: takes part in synchronisation.
    pub strong: bool,
    /// `ld.global.nc`: nothing writes the data during the launch.
    pub read_only: bool,
}

/// Operation of `atom` and `red`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AtomicOp {
    AddInt,
    AddF32,
    AddF64,
    MinUnsigned,
    MinSigned,
    MaxUnsigned,
    MaxSigned,
    And,
    Or,
    Xor,
    Increment,
    Decrement,
    Exchange,
    CompareSwap,
}

/// `atom` or `red`.
#[derive(Clone, Debug)]
pub(crate) struct Atomic {
    pub space: Space,
    pub op: AtomicOp,
    /// 4 or 8.
    pub bytes: u32,
    pub destination: Option<Data>,
    pub address: Address,
    pub operand: Data,
    /// The new value of a compare-and-swap.
    pub swap: Option<Data>,
}

/// `cp.async`.
#[derive(Clone, Debug)]
pub(crate) struct AsyncCopy {
    pub destination: Address,
    pub source: Address,
    pub bytes: u32,
    /// Bytes to read, the rest are zeros; all of them if absent.
    pub source_bytes: Option<Reg>,
}

/// `ldmatrix` or `stmatrix`.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub store: bool,
    pub transposed: bool,
    /// One word register for each 8x8 matrix: 1, 2 or 4.
    pub registers: Vec<Reg>,
    pub address: Address,
}

/// Operand type of `mma`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MmaType {
    F16,
    Bf16,
}

/// `mma.m16n8k16` or `.m16n8k8` with fp32 accumulators.
#[derive(Clone, Debug)]
pub(crate) struct Mma {
    pub operand_type: MmaType,
    pub d: [Reg; 4],
    /// Four registers for k = 16, two for k = 8.
    pub a: Vec<Reg>,
    /// Two registers for k = 16, one for k = 8.
    pub b: Vec<Reg>,
    pub c: [Reg; 4],
}

/// Which lane `shfl` reads.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// `shfl.sync`.
#[derive(Clone, Debug)]
pub(crate) struct Shuffle {
    pub mode: ShuffleMode,
    pub d: Reg,
    pub in_range: Option<Reg>,
    pub a: Reg,
    pub b: Reg,
    pub c: Reg,
    pub members: Reg,
}

/// `vote.sync`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
}

/// Addition or subtraction through the carry flag.
#[derive(Clone, Debug)]
pub(crate) struct Carry {
    pub subtract: bool,
    pub carry_in: bool,
    pub carry_out: bool,
    pub d: Data,
    pub a: Data,
    pub b: Data,
}

/// What an instruction does. In the names of arithmetic shapes the destination's file comes first: `Word2` makes a word of two words.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Word1 {
        f: fn(&Words, &mut Words),
        d: Reg,
        a: Reg,
    },
    Word2 {
        f: fn(&Words, &Words, &mut Words),
        d: Reg,
        a: Reg,
        b: Reg,
    },
    Word3 {
        f: fn(&Words, &Words, &Words, &mut Words),
        d: Reg,
        a: Reg,
        b: Reg,
        c: Reg,
    },
    /// The fourth operand is shared by all lanes where it must be (`lop3`'s table).
    Word4 {
        f: fn([&Words; 4], &mut Words),
        d: Reg,
        s: [Reg; 4],
    },
    WordOfLong {
        f: fn(&Longs, &mut Words),
        d: Reg,
        a: Reg,
    },
    Long1 {
        f: fn(&Longs, &mut Longs),
        d: Reg,
        a: Reg,
    },
    Long2 {
        f: fn(&Longs, &Longs, &mut Longs),
        d: Reg,
        a: Reg,
        b: Reg,
    },
    Long3 {
        f: fn(&Longs, &Longs, &Longs, &mut Longs),
        d: Reg,
        a: Reg,
        b: Reg,
        c: Reg,
    },
    LongOfWord {
        f: fn(&Words, &mut Longs),
        d: Reg,
        a: Reg,
    },
    LongOfWords {
        f: fn(&Words, &Words, &mut Longs),
        d: Reg,
        a: Reg,
        b: Reg,
    },
    LongOfWordsLong {
        f: fn(&Words, &Words, &Longs, &mut Longs),
        d: Reg,
        a: Reg,
        b: Reg,
        c: Reg,
    },
    LongShift {
        f: fn(&Longs, &Words, &mut Longs),
        d: Reg,
        a: Reg,
        b: Reg,
    },
    LongField {
        f: fn(&Longs, &Words, &Words, &mut Longs),
        d: Reg,
        a: Reg,
        b: Reg,
        c: Reg,
    },
    CompareWords {
        f: fn(&Words, &Words) -> u32,
        d: Reg,
        a: Reg,
        b: Reg,
        with: Option<(Logic, Predicate)>,
    },
    CompareLongs {
        f: fn(&Longs, &Longs) -> u32,
        d: Reg,
        a: Reg,
        b: Reg,
        with: Option<(Logic, Predicate)>,
    },
    SelectWord {
        d: Reg,
        a: Reg,
        b: Reg,
        p: Predicate,
    },
    SelectLong {
        d: Reg,
        a: Reg,
        b: Reg,
        p: Predicate,
    },
    Predicates {
        logic: Logic,
        d: Reg,
        a: Predicate,
        b: Predicate,
    },
    /// `width`: bits of the destination register.
    Convert {
        conversion: crate::convert::Conversion,
        d: Data,
        width: u32,
        a: Data,
    },
    Carry(Box<Carry>),
    Clock {
        d: Data,
    },
    Access(Box<(bool, Access)>),
    Atomic(Box<Atomic>),
    AsyncCopy(Box<AsyncCopy>),
    AsyncCommit,
    /// All but the newest `pending` groups of the thread land.
    AsyncWait {
        pending: u32,
    },
    AsyncWaitAll,
    Fence,
    /// `fence.proxy.async`.
    FenceProxy,
    Matrix(Box<Matrix>),
    MoveMatrix {
        d: Reg,
        a: Reg,
    },
    Mma(Box<Mma>),
    Hopper(Box<Hopper>),
    Shuffle(Box<Shuffle>),
    Reduce {
        f: fn(&Words) -> u32,
        d: Reg,
        a: Reg,
        members: Reg,
    },
    Vote {
        mode: VoteMode,
        d: Reg,
        a: Predicate,
        members: Reg,
    },
    Ballot {
        d: Reg,
        a: Predicate,
        members: Reg,
    },
    ActiveMask {
        d: Reg,
    },
    WarpBarrier {
        members: Reg,
    },
    /// `bar.sync` (or, not waiting, `bar.arrive`) on barrier `id`, of all threads of the block or of `threads`.
    BlockBarrier {
        id: Reg,
        threads: Option<Reg>,
        wait: bool,
    },
    /// `barrier.cluster.arrive` and `barrier.cluster.wait`, of all threads of all blocks of the cluster.
    ClusterBarrier,
    Branch {
        target: u32,
    },
    BranchIndexed {
        index: Reg,
        targets: Box<[u32]>,
    },
    Exit,
    Trap,
    /// `nanosleep`: lets other warps and blocks run.
    Yield,
    Nop,
}

impl Op {
    /// Whether the whole warp must execute it together.
    pub fn is_collective(&self) -> bool {
        if let Op::Hopper(hopper) = self {
            return matches!(**hopper, Hopper::Wgmma(_) | Hopper::WgmmaCommit | Hopper::WgmmaWait { .. });
        }
        matches!(
            self,
            Op::Matrix(_)
                | Op::MoveMatrix { .. }
                | Op::Mma(_)
                | Op::Shuffle(_)
                | Op::Reduce { .. }
                | Op::Vote { .. }
                | Op::Ballot { .. }
                | Op::ActiveMask { .. }
                | Op::WarpBarrier { .. }
                | Op::BlockBarrier { .. }
                | Op::ClusterBarrier
        )
    }
}

/// An instruction of an entry and where its text is.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub guard: Option<Predicate>,
    pub op: Op,
    /// Whether the whole warp must execute it together.
    pub collective: bool,
    pub line: u32,
    /// Byte range of the text in the module's source.
    pub text: std::ops::Range<u32>,
}

/// A special register: a register that the launch fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid,
    Ntid,
    Ctaid(usize),
    Nctaid(usize),
    ClusterRank,
    Lane,
    Warp,
    Warps,
    Sm,
    LaneMaskLt,
    LaneMaskLe,
    LaneMaskEq,
    LaneMaskGt,
    LaneMaskGe,
    DynamicSharedBytes,
    /// Address of dynamic shared memory.
    DynamicShared,
    Zero,
    One,
}

/// The code of one entry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    pub instructions: Vec<Instruction>,
    pub words: u32,
    pub longs: u32,
    pub predicates: u32,
    pub word_constants: Vec<(Reg, u32)>,
    pub long_constants: Vec<(Reg, u64)>,
    pub predicate_constants: Vec<(Reg, bool)>,
    pub specials: Vec<(Data, Special)>,
}
