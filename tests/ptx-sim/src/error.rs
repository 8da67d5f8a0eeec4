//! What can go wrong: in the text, in a launch, in the host's use of memory, in the kernel.

/// Why a module could not be parsed, launched or run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX, or uses what is not simulated.
    #[error("line {line}: {message}")]
    Parse {
        /// Line of the text, from 1.
        line: usize,
        /// What was found there.
        message: String,
    },
    /// The module has no such entry.
    #[error("no entry `{entry}`; the module has: {}", available.join(", "))]
    UnknownEntry {
        /// The name asked for.
        entry: String,
        /// The names that the module has.
        available: Vec<String>,
    },
    /// The parameter buffer does not match the entry's parameter list.
    #[error("{entry}: takes {expected} bytes of parameters, given {found}")]
    ParameterBytes {
        /// Name of the entry.
        entry: String,
        /// Bytes of its parameter list.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The launch's grid, block or shared memory is not one that a GPU would take.
    #[error("{entry}: {quantity} = {found}, must be {rule}")]
    LaunchSize {
        /// Name of the entry.
        entry: String,
        /// What is wrong: `grid`, `block`, `shared_bytes`.
        quantity: &'static str,
        /// Its value.
        found: u64,
        /// What it must be.
        rule: String,
    },
    /// The host asked for memory that is not there, or that nobody wrote.
    #[error("host access of {bytes} bytes at {address:#x}: {reason}")]
    HostAccess {
        /// First byte (of the range asked for, or the first that nobody wrote).
        address: u64,
        /// Bytes asked for.
        bytes: usize,
        /// What is wrong with them.
        reason: &'static str,
    },
    /// The kernel did what it must not do.
    #[error(transparent)]
    Fault(Box<Fault>),
}

impl Error {
    /// The kernel's fault, if that is what this error is.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Error::Fault(fault) => Some(fault),
            _ => None,
        }
    }
}

/// Something that a kernel did and must not do, and where.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{entry}, block {block:?}, {}: {cause}\n  line {line}: {instruction}", Thread(*warp, *lane))]
pub struct Fault {
    /// Name of the entry.
    pub entry: String,
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Warp of the block.
    pub warp: u32,
    /// Lane of the warp, where one lane is to blame. The thread is `32 * warp + lane`.
    pub lane: Option<u32>,
    /// Line of the PTX text, from 1.
    pub line: usize,
    /// Text of the instruction.
    pub instruction: String,
    /// What it did.
    pub cause: Cause,
}

struct Thread(u32, Option<u32>);

impl std::fmt::Display for Thread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.1 {
            Some(lane) => write!(f, "thread {} (warp {}, lane {lane})", 32 * self.0 + lane, self.0),
            None => write!(f, "warp {}", self.0),
        }
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// An mbarrier that is not used as it must be.
    #[error("the mbarrier at {address:#x} must be {rule}")]
    Mbarrier {
        /// Its shared address.
        address: u64,
        /// What must hold.
        rule: &'static str,
    },
    /// Shared memory of a block of the cluster that has exited.
    #[error("shared address {address:#x} is of block {rank} of the cluster, which has exited")]
    ExitedBlock {
        /// The address.
        address: u64,
        /// The block's rank in its cluster.
        rank: u32,
    },
    /// What a TMA instruction names is not a tensor map of its rank.
    #[error("no tensor map of this rank at {address:#x}")]
    TensorMap {
        /// The generic address.
        address: u64,
    },
    /// An access that is not inside one allocation.
    #[error("{bytes} bytes at {space} address {address:#x} are out of bounds")]
    OutOfBounds {
        /// Memory of the access.
        space: Space,
        /// Its address.
        address: u64,
        /// Its size.
        bytes: u32,
    },
    /// An access whose address is not a multiple of what it must be.
    #[error("{space} address {address:#x} is not a multiple of {alignment}")]
    Misaligned {
        /// Memory of the access.
        space: Space,
        /// Its address.
        address: u64,
        /// Required alignment in bytes.
        alignment: u32,
    },
    /// A read of bytes that nobody wrote.
    #[error("read of {space} address {address:#x}, which nobody has written")]
    Unwritten {
        /// Memory of the access.
        space: Space,
        /// Address of the 4-byte word.
        address: u64,
    },
    /// A word that is read as read-only data and written in one launch, in either order.
    #[error("global address {address:#x} is read by ld.global.nc and written in the same launch")]
    NotReadOnly {
        /// Address of the 4-byte word.
        address: u64,
    },
    /// A store into memory that kernels cannot write.
    #[error("write to {space} address {address:#x}, which is read-only")]
    ReadOnly {
        /// Memory of the access.
        space: Space,
        /// Its address.
        address: u64,
    },
    /// An access to the destination of a `cp.async` that no wait has completed.
    #[error("access to shared address {address:#x} while a cp.async into it is not waited for")]
    PendingCopy {
        /// Shared address of the 4-byte word.
        address: u64,
    },
    /// Two warps touched the same word, one of them writing, with no barrier between.
    #[error(
        "race: {} of shared address {address:#x} is not ordered after the {} by warp {other}",
        if *write { "write" } else { "read" }, if *other_wrote { "write" } else { "read" }
    )]
    Race {
        /// Shared address of the 4-byte word.
        address: u64,
        /// Whether this access writes.
        write: bool,
        /// Warp of the earlier access.
        other: u32,
        /// Whether the earlier access wrote.
        other_wrote: bool,
    },
    /// An asynchronous operation touched what threads wrote, with no `fence.proxy.async` between.
    #[error(
        "an asynchronous operation touches shared address {address:#x}, which warp {writer} wrote, with no fence.proxy.async between"
    )]
    ProxyFence {
        /// Shared address of the 4-byte word.
        address: u64,
        /// Warp of the write.
        writer: u32,
    },
    /// A lane read what another lane of its warp wrote, with no `bar.warp.sync` or block barrier between.
    #[error(
        "race: read of shared address {address:#x}, which lane {other} of the same warp wrote since the last barrier"
    )]
    LaneRace {
        /// Shared address of the 4-byte word.
        address: u64,
        /// The lane that wrote it; 32 for the whole warp together (`stmatrix`).
        other: u32,
    },
    /// A collective instruction that not all 32 lanes of the warp execute together.
    #[error("collective executed by lanes {lanes:#010x}, not by the whole warp")]
    Diverged {
        /// Mask of the lanes that arrived.
        lanes: u32,
    },
    /// A collective's operand that must be the same in all lanes (or name all of them) and does not.
    #[error("operand {operand} of a collective must be {rule}")]
    CollectiveOperand {
        /// Position of the operand, from 0.
        operand: u32,
        /// What it must be.
        rule: &'static str,
    },
    /// Warps wait at a barrier that can never complete.
    #[error("barrier {barrier} waits for {expected} threads and {arrived} came; warps {exited:#x} (mask) have exited")]
    BarrierNeverCompletes {
        /// Number of the barrier.
        barrier: u32,
        /// Threads that it waits for.
        expected: u32,
        /// Threads that arrived.
        arrived: u32,
        /// Mask of the warps that exited.
        exited: u32,
    },
    /// Two warps disagree on a barrier's thread count, or the count is not possible.
    #[error("barrier {barrier} with {found} threads: expected {expected}")]
    BarrierCount {
        /// Number of the barrier.
        barrier: u32,
        /// Thread count of this warp.
        found: u32,
        /// What was expected.
        expected: u32,
    },
    /// `trap`.
    #[error("trap")]
    Trap,
    /// An indirect branch past the end of its table.
    #[error("branch index {index} in a table of {targets}")]
    BranchIndex {
        /// The index.
        index: u32,
        /// Length of the table.
        targets: u32,
    },
    /// The block ran too long: probably an endless loop.
    #[error("the block has run {limit} warp instructions: an endless loop, or raise Options::max_warp_instructions")]
    TooLong {
        /// The limit.
        limit: u64,
    },
}

/// A memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Addressed through generic pointers: global, shared or parameters.
    Generic,
    /// Global memory, and the module's constants.
    Global,
    /// The block's shared memory.
    Shared,
    /// The entry's parameters.
    Param,
}

impl std::fmt::Display for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Space::Generic => "generic",
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Param => "parameter",
        })
    }
}

/// A cause and the lane to blame, before the place is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneFault {
    pub lane: Option<u32>,
    pub cause: Cause,
}

impl From<Cause> for LaneFault {
    fn from(cause: Cause) -> Self {
        LaneFault { lane: None, cause }
    }
}

impl Cause {
    /// This cause, on account of `lane`.
    pub(crate) fn on(self, lane: usize) -> LaneFault {
        LaneFault { lane: Some(lane as u32), cause: self }
    }
}
