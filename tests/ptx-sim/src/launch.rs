//! Launching an entry: clusters (of one block, if the entry has none) on the threads of the rayon pool, warps of a cluster in turns.
//!
//! Blocks start in order of their index. Warps and blocks that run long give way to others, so that kernels whose blocks or warps wait
//! for each other make progress, on one thread too.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::error::{Cause, Fault, LaneFault};
use crate::hopper::WARPGROUP_BARRIER;
use crate::module::{Entry, Module};
use crate::op::Special;
use crate::shared::{Clocks, MAX_WARPS, NOTHING, SHARED_BASE, Shared, in_block};
use crate::warp::{Environment, Event, Warp};
use crate::{Error, Memory};

/// Instructions of a warp before the block's next one has its turn.
const WARP_TURN: u64 = 1 << 14;
/// Rounds of turns of a block before another block has its turn.
const BLOCK_TURN: u32 = 8;
/// Rounds of turns of a block that runs ahead, if none of its warps uses up its turn (which a wait for another block does), and instructions
/// of such a turn.
const AHEAD: (u32, u64) = (64, 1 << 10);
/// The same of the others.
const BEHIND: (u32, u64) = (1, 1 << 7);
/// Instructions of a turn where a warp is late, and rounds of turns for each of its own.
const LATE: (u64, u64) = (1 << 7, 64);
/// Most shared memory of a block on any GPU of today, in bytes.
const MAX_SHARED_BYTES: usize = 232_448;
/// What a launch checks.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Warp instructions that a block may execute.
    pub max_warp_instructions: u64,
    /// Whether unordered accesses of two warps to one word of shared memory are faults.
    pub detect_races: bool,
    /// Whether reads of shared memory that nobody wrote are faults. (In global memory that depends on the allocation.)
    pub detect_unwritten_shared: bool,
    /// Index of a block that, with its cluster, runs some hundred times as fast as any other, in an order that is the same each time: it comes to what the others
    /// do long before they have done it, so that waits which are missing are seen. All blocks run on one thread then.
    pub ahead: Option<u64>,
    /// Rank of a block that in every cluster runs only once in a while, unless all others of the cluster wait for it at barriers.
    pub late_rank: Option<usize>,
    /// Index of a warp that in every block runs only once in a while, unless all others wait for it at barriers: what others do meanwhile must not
    /// lose it.
    pub late_warp: Option<usize>,
}

impl Default for Options {
    /// All checks, 2^30 instructions a block, and blocks side by side.
    fn default() -> Self {
        Options {
            max_warp_instructions: 1 << 30,
            detect_races: true,
            detect_unwritten_shared: true,
            ahead: None,
            late_rank: None,
            late_warp: None,
        }
    }
}

/// What a launch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks run.
    pub blocks: u64,
    /// Instructions executed by warps. (Those that unpack into several registers count once for each.)
    pub warp_instructions: u64,
    /// Instructions executed by threads that were active and whose guard held.
    pub thread_instructions: u64,
    /// `mma` instructions, counted by warp.
    pub mma_instructions: u64,
    /// Block barriers completed.
    pub barriers: u64,
    /// Bytes that threads read from global memory.
    pub global_read_bytes: u64,
    /// Bytes that threads wrote to global memory.
    pub global_write_bytes: u64,
}

impl Stats {
    fn add(&mut self, other: &Stats) {
        self.blocks += other.blocks;
        self.warp_instructions += other.warp_instructions;
        self.thread_instructions += other.thread_instructions;
        self.mma_instructions += other.mma_instructions;
        self.barriers += other.barriers;
        self.global_read_bytes += other.global_read_bytes;
        self.global_write_bytes += other.global_write_bytes;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// At a barrier, which the warp came to with the instruction at this index.
    Waiting {
        barrier: usize,
        pc: u32,
    },
    Exited,
}

/// A named barrier.
#[derive(Clone, Copy)]
struct Barrier {
    expected: u32,
    arrived: u32,
    known: Clocks,
}

const IDLE: Barrier = Barrier { expected: 0, arrived: 0, known: NOTHING };

/// A cluster under way.
struct Cluster {
    /// Of its first block.
    index: u64,
    /// Of its first block.
    place: [u32; 3],
    /// Those of its first block, then those of the next one.
    warps: Vec<Warp>,
    states: Vec<State>,
    /// The named barriers of each block, see [`WARPGROUP_BARRIER`]; one for each warpgroup; that of the cluster.
    barriers: Vec<Barrier>,
    shared: Shared,
    stats: Stats,
    /// Rounds of turns that its warps had.
    rounds: u64,
}

/// A launch under way.
struct Launch<'a> {
    module: &'a Module,
    entry: &'a Entry,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: usize,
    params: &'a [u8],
    memory: &'a Memory,
    options: Options,
}

/// Work that is left.
struct Queue {
    next_block: u64,
    paused: VecDeque<Box<Cluster>>,
    stats: Stats,
    /// The fault of the lowest block that has one.
    fault: Option<(u64, Error)>,
}

/// What to run next.
enum Work {
    Start(u64),
    Resume(Box<Cluster>),
}

impl Queue {
    /// The first block of a cluster that has not started or, if all `blocks` have, a cluster that paused.
    fn next(&mut self, blocks: u64, cluster_size: u64) -> Option<Work> {
        if self.next_block == blocks {
            return self.paused.pop_front().map(Work::Resume);
        }
        self.next_block += cluster_size;
        Some(Work::Start(self.next_block - cluster_size))
    }
}

impl Module {
    /// Runs an entry on the CPU with all checks: see [`Module::launch_with`].
    ///
    /// # Errors
    /// See [`Module::launch_with`].
    pub fn launch(
        &self,
        entry: &str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: usize,
        params: &[u8],
        memory: &mut Memory,
    ) -> Result<Stats, Error> {
        self.launch_with(entry, Size { grid, block, shared_bytes }, params, memory, Options::default())
    }

    /// Runs an entry on the CPU: a grid of one-dimensional blocks. `params` are the parameters' bytes as the entry's parameter list lays
    /// them out: for an entry with one struct, the struct's bytes.
    ///
    /// # Errors
    /// [`Error::UnknownEntry`], [`Error::ParameterBytes`] and [`Error::LaunchSize`] before anything runs; [`Error::Fault`] for what the
    /// kernel does wrong, after which `memory` holds what was written until then.
    pub fn launch_with(
        &self,
        entry: &str,
        size: Size,
        params: &[u8],
        memory: &mut Memory,
        options: Options,
    ) -> Result<Stats, Error> {
        let entry = self.entry(entry)?;
        let Size { grid, block: threads, shared_bytes } = size;
        if params.len() != entry.parameter_bytes() {
            let (expected, found) = (entry.parameter_bytes(), params.len());
            return Err(Error::ParameterBytes { entry: entry.name().into(), expected, found });
        }
        let wrong =
            |quantity, found, rule| Err(Error::LaunchSize { entry: entry.name().into(), quantity, found, rule });
        let most = entry.max_threads().unwrap_or(1024).min(1024);
        if threads == 0 || !threads.is_multiple_of(32) || threads > most {
            return wrong("block", threads as u64, format!("a multiple of 32, from 32 to {most}"));
        }
        for (extent, most) in grid.into_iter().zip([i32::MAX as u32, 65535, 65535]) {
            if extent == 0 || extent > most {
                return wrong("grid", extent as u64, format!("from 1 to {most}"));
            }
        }
        let most = MAX_SHARED_BYTES - entry.static_shared_bytes().min(MAX_SHARED_BYTES);
        if shared_bytes > most {
            return wrong("shared_bytes", shared_bytes as u64, format!("at most {most}"));
        }
        let cluster_size = entry.cluster_size();
        if !grid[0].is_multiple_of(cluster_size) {
            return wrong("grid", grid[0].into(), format!("whole clusters of {cluster_size} blocks"));
        }
        if cluster_size > 1 && (cluster_size * threads / 32 > MAX_WARPS as u32 || entry.static_shared_bytes() > 0) {
            let rule = "clusters of at most 32 warps in all, without static shared memory".to_string();
            return wrong("block", threads.into(), rule);
        }
        memory.begin_launch();
        Launch { module: self, entry, grid, threads, shared_bytes, params, memory, options }.run()
    }
}

/// Size of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x: a multiple of 32.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
}

impl Launch<'_> {
    fn run(&self) -> Result<Stats, Error> {
        let blocks = self.grid.iter().map(|&extent| extent as u64).product::<u64>();
        let queue = Mutex::new(Queue { next_block: 0, paused: VecDeque::new(), stats: Stats::default(), fault: None });
        let stop = AtomicBool::new(false);
        let threads = if self.options.ahead.is_some() { 1 } else { rayon::current_num_threads() as u64 };
        let workers = threads.min(blocks);
        rayon::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|_| self.work(&queue, blocks, &stop));
            }
        });
        let queue = queue.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        match queue.fault {
            None => Ok(queue.stats),
            Some((_, error)) => Err(error),
        }
    }

    /// Runs blocks until none is left.
    fn work(&self, queue: &Mutex<Queue>, blocks: u64, stop: &AtomicBool) {
        let lock = || queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while !stop.load(Relaxed) {
            let Some(work) = lock().next(blocks, u64::from(self.entry.cluster_size())) else { return };
            let mut cluster = match work {
                Work::Start(index) => self.cluster(index),
                Work::Resume(cluster) => *cluster,
            };
            match self.turn(&mut cluster) {
                Ok(true) => lock().stats.add(&cluster.stats),
                Ok(false) => lock().paused.push_back(Box::new(cluster)),
                Err(error) => {
                    stop.store(true, Relaxed);
                    let mut guard = lock();
                    if guard.fault.as_ref().is_none_or(|(index, _)| *index > cluster.index) {
                        guard.fault = Some((cluster.index, error));
                    }
                }
            }
        }
    }

    /// Warps of a block.
    fn block_warps(&self) -> usize {
        self.threads as usize / 32
    }

    /// A cluster before its first instruction; `index` is of its first block.
    fn cluster(&self, index: u64) -> Cluster {
        let [x, y, _] = self.grid.map(u64::from);
        let place = [index % x, index / x % y, index / x / y].map(|i| i as u32);
        let program = &self.entry.program;
        let (warps, blocks) = (self.threads / 32, self.entry.cluster_size());
        let all_warps = (warps * blocks) as usize;
        let static_bytes = self.entry.static_shared_bytes();
        let special = |warp: u32| {
            move |kind: Special, lane: u32| -> u64 {
                let (rank, warp) = (warp / warps, warp % warps);
                let below = (1u32 << lane) - 1;
                let equal = 1u32 << lane;
                (match kind {
                    Special::Tid => 32 * warp + lane,
                    Special::Ntid => self.threads,
                    Special::Ctaid(axis) => place[axis] + if axis == 0 { rank } else { 0 },
                    Special::ClusterRank => rank,
                    Special::Nctaid(axis) => self.grid[axis],
                    Special::Lane => lane,
                    Special::Warp => warp,
                    Special::Warps => warps,
                    Special::Sm | Special::Zero => 0,
                    Special::One => 1,
                    Special::LaneMaskLt => below,
                    Special::LaneMaskLe => below | equal,
                    Special::LaneMaskEq => equal,
                    Special::LaneMaskGt => !(below | equal),
                    Special::LaneMaskGe => !below,
                    Special::DynamicSharedBytes => self.shared_bytes as u32,
                    Special::DynamicShared => in_block(SHARED_BASE as u32 + static_bytes as u32, rank),
                }) as u64
            }
        };
        let Options { detect_races, detect_unwritten_shared, .. } = self.options;
        let bytes = static_bytes + self.shared_bytes;
        let barriers = blocks as usize * WARPGROUP_BARRIER as usize + all_warps.div_ceil(4) + 1;
        Cluster {
            index,
            place,
            warps: (0..all_warps).map(|warp| Warp::new(program, warp, special(warp as u32))).collect(),
            states: vec![State::Ready; all_warps],
            barriers: vec![IDLE; barriers],
            shared: Shared::new(bytes, blocks as usize, detect_races, detect_unwritten_shared, all_warps),
            stats: Stats { blocks: u64::from(blocks), ..Stats::default() },
            rounds: 0,
        }
    }

    /// Runs a cluster for a while. True if it is done.
    fn turn(&self, cluster: &mut Cluster) -> Result<bool, Error> {
        let blocks = u64::from(self.entry.cluster_size());
        let is_any_late = self.options.late_warp.is_some() || self.options.late_rank.is_some();
        let (rounds, instructions) = match (self.options.ahead, is_any_late) {
            (None, false) => (BLOCK_TURN, WARP_TURN),
            (None, true) => (BLOCK_TURN, LATE.0),
            (Some(ahead), _) if ahead / blocks == cluster.index / blocks => AHEAD,
            (Some(_), _) => BEHIND,
        };
        for _ in 0..rounds {
            let (mut ran, mut used_up) = (false, false);
            cluster.rounds += 1;
            let is_late = |warp: usize| {
                let (rank, warp) = (warp / self.block_warps(), warp % self.block_warps());
                self.options.late_warp == Some(warp) || self.options.late_rank == Some(rank)
            };
            let has_turn = |warp: usize| cluster.states[warp] == State::Ready && !is_late(warp);
            let late_has_turn = cluster.rounds.is_multiple_of(LATE.1) || !(0..cluster.warps.len()).any(has_turn);
            for warp in 0..cluster.warps.len() {
                if cluster.states[warp] == State::Ready && (late_has_turn || !is_late(warp)) {
                    ran = true;
                    let before = cluster.stats.warp_instructions;
                    self.turn_of_warp(cluster, warp, instructions)?;
                    used_up |= cluster.stats.warp_instructions - before >= instructions;
                }
            }
            if cluster.states.iter().all(|state| *state == State::Exited) {
                return Ok(true);
            }
            if !ran {
                return Err(self.stuck(cluster));
            }
            let limit = self.options.max_warp_instructions;
            if cluster.stats.warp_instructions > limit * blocks {
                let warp = cluster.states.iter().position(|state| *state == State::Ready).unwrap_or(0);
                return Err(self.fault(cluster, warp, cluster.warps[warp].pc(), Cause::TooLong { limit }.into()));
            }
            if used_up && self.options.ahead.is_some() {
                break;
            }
        }
        Ok(false)
    }

    fn turn_of_warp(&self, cluster: &mut Cluster, warp: usize, instructions: u64) -> Result<(), Error> {
        let mut env = Environment {
            program: &self.entry.program,
            memory: self.memory,
            constants: &self.module.constants,
            params: self.params,
            shared: &mut cluster.shared,
            stats: &mut cluster.stats,
        };
        match cluster.warps[warp].run(&mut env, instructions) {
            Ok(Event::Paused) => {}
            Ok(Event::Exited) => {
                cluster.states[warp] = State::Exited;
                let rank = warp / self.block_warps();
                let of_block = &cluster.states[rank * self.block_warps()..(rank + 1) * self.block_warps()];
                if of_block.iter().all(|state| *state == State::Exited) {
                    cluster.shared.exit(rank);
                }
            }
            Ok(Event::Barrier { id, threads, wait }) => {
                let pc = cluster.warps[warp].pc() - 1;
                let found = threads.unwrap_or(self.threads);
                let possible = found > 0 && found.is_multiple_of(32) && found <= self.threads;
                let arrival = if id < WARPGROUP_BARRIER && possible {
                    let barrier = warp / self.block_warps() * WARPGROUP_BARRIER as usize + id as usize;
                    self.arrive(cluster, warp, barrier, found, wait)
                } else {
                    Err(Cause::BarrierCount { barrier: id, found, expected: self.threads })
                };
                arrival.map_err(|cause| self.fault(cluster, warp, pc, cause.into()))?;
            }
            Ok(Event::Warpgroup) => {
                let pc = cluster.warps[warp].pc() - 1;
                let first = self.entry.cluster_size() * WARPGROUP_BARRIER;
                self.arrive(cluster, warp, first as usize + warp / 4, 128, true)
                    .map_err(|cause| self.fault(cluster, warp, pc, cause.into()))?;
            }
            Ok(Event::ClusterBarrier) => {
                let pc = cluster.warps[warp].pc() - 1;
                let (last, threads) = (cluster.barriers.len() - 1, self.entry.cluster_size() * self.threads);
                self.arrive(cluster, warp, last, threads, true)
                    .map_err(|cause| self.fault(cluster, warp, pc, cause.into()))?;
            }
            Err(fault) => return Err(self.fault(cluster, warp, cluster.warps[warp].pc(), fault)),
        }
        Ok(())
    }

    /// A warp comes to a barrier of the cluster's, of `found` threads.
    fn arrive(&self, cluster: &mut Cluster, warp: usize, id: usize, found: u32, wait: bool) -> Result<(), Cause> {
        let number = self.barrier_number(id);
        let barrier = &mut cluster.barriers[id];
        if barrier.arrived > 0 && barrier.expected != found {
            return Err(Cause::BarrierCount { barrier: number, found, expected: barrier.expected });
        }
        barrier.expected = found;
        barrier.arrived += 32;
        let clocks = cluster.shared.publish(warp);
        barrier.known.iter_mut().zip(&clocks).for_each(|(known, clock)| *known = (*known).max(*clock));
        if wait {
            cluster.states[warp] = State::Waiting { barrier: id, pc: cluster.warps[warp].pc() - 1 };
        }
        if barrier.arrived == barrier.expected {
            cluster.stats.barriers += 1;
            for (warp, state) in cluster.states.iter_mut().enumerate() {
                if matches!(state, State::Waiting { barrier, .. } if *barrier == id) {
                    *state = State::Ready;
                    cluster.shared.learn(warp, &barrier.known);
                }
            }
            *barrier = IDLE;
        }
        Ok(())
    }

    /// Number of a barrier in its block; those that have none follow the named ones.
    fn barrier_number(&self, id: usize) -> u32 {
        let named = (self.entry.cluster_size() * WARPGROUP_BARRIER) as usize;
        if id < named { id as u32 % WARPGROUP_BARRIER } else { WARPGROUP_BARRIER + (id - named) as u32 }
    }

    /// The fault of a cluster whose warps all wait or have exited.
    fn stuck(&self, cluster: &Cluster) -> Error {
        let mut waiting = cluster.states.iter().enumerate().filter_map(|(warp, state)| match *state {
            State::Waiting { barrier, pc } => Some((warp, barrier, pc)),
            _ => None,
        });
        let (warp, barrier, pc) = waiting.next().unwrap_or_default();
        let exited = cluster.states.iter().enumerate().filter(|(_, state)| **state == State::Exited);
        let exited = exited.fold(0, |mask, (warp, _)| mask | 1 << warp);
        let Barrier { expected, arrived, .. } = cluster.barriers[barrier];
        let cause = Cause::BarrierNeverCompletes { barrier: self.barrier_number(barrier), expected, arrived, exited };
        self.fault(cluster, warp, pc, cause.into())
    }

    fn fault(&self, cluster: &Cluster, warp: usize, pc: u32, fault: LaneFault) -> Error {
        let instruction = &self.entry.program.instructions[pc as usize];
        let text = &self.module.source[instruction.text.start as usize..instruction.text.end as usize];
        Error::Fault(Box::new(Fault {
            entry: self.entry.name().into(),
            block: [cluster.place[0] + (warp / self.block_warps()) as u32, cluster.place[1], cluster.place[2]],
            warp: (warp % self.block_warps()) as u32,
            lane: fault.lane,
            line: instruction.line as usize,
            instruction: text.split_whitespace().collect::<Vec<_>>().join(" "),
            cause: fault.cause,
        }))
    }
}
