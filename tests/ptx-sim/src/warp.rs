//! A warp: its registers, its divergence, and the loop that executes it.
//!
//! Lanes that diverged are groups, each with its program counter; the group with the lowest counter runs, and groups that meet merge. A
//! group that comes to a collective without the rest of the warp waits there while the others run: if they never come, that is a fault.

use std::sync::atomic::{Ordering, fence};

use crate::access::Copy;
use crate::error::{Cause, LaneFault};
use crate::hopper::{Hopper, IssuedStore, IssuedWgmma};
use crate::launch::Stats;
use crate::memory::Memory;
use crate::op::{
    Carry, Data, FULL, Longs, Op, Predicate, Program, Reg, Shuffle, ShuffleMode, Special, VoteMode, Words,
};
use crate::shared::{BLOCK_BYTES, Shared};

/// Lanes that are elsewhere than the running ones.
struct Group {
    pc: u32,
    lanes: u32,
    /// At a collective, for the rest of the warp.
    waiting: bool,
}

/// What a warp runs in.
pub(crate) struct Environment<'a> {
    pub program: &'a Program,
    pub memory: &'a Memory,
    pub constants: &'a [u8],
    pub params: &'a [u8],
    pub shared: &'a mut Shared,
    pub stats: &'a mut Stats,
}

/// Why a warp stopped running.
pub(crate) enum Event {
    /// It came to a block barrier of `threads` threads (or of all), to wait there or not.
    Barrier { id: u32, threads: Option<u32>, wait: bool },
    /// It came to a barrier of its cluster.
    ClusterBarrier,
    /// It has finished wgmmas, and waits for the rest of its warpgroup.
    Warpgroup,
    /// All its lanes are done.
    Exited,
    /// It used up its turn, or said that it waits for others.
    Paused,
}

pub(crate) struct Warp {
    /// Among the warps of the cluster.
    pub index: usize,
    /// What its block's shared addresses have above those of the cluster's first block.
    pub own_block: u64,
    pub words: Vec<Words>,
    pub longs: Vec<Longs>,
    predicates: Vec<u32>,
    carry: u32,
    pc: u32,
    active: u32,
    /// The lowest program counter of another group ahead: where the running group may merge.
    merge_pc: u32,
    others: Vec<Group>,
    pub copies: Vec<Copy>,
    pub commits: Words,
    pub wgmmas: Vec<IssuedWgmma>,
    /// Groups of wgmmas that were committed.
    pub wgmma_groups: u32,
    pub stores: Vec<IssuedStore>,
    /// Groups of bulk stores that each lane has committed.
    pub store_groups: Words,
}

impl Warp {
    /// A warp at the start of `program`; `special` gives the values of special registers by lane.
    pub fn new(program: &Program, index: usize, special: impl Fn(Special, u32) -> u64) -> Self {
        // Registers hold NaN in every format until they are written.
        let mut words = vec![[u32::MAX; 32]; program.words as usize];
        let mut longs = vec![[u64::MAX; 32]; program.longs as usize];
        let mut predicates = vec![0; program.predicates as usize];
        for &(register, value) in &program.word_constants {
            words[register as usize] = [value; 32];
        }
        for &(register, value) in &program.long_constants {
            longs[register as usize] = [value; 32];
        }
        for &(register, value) in &program.predicate_constants {
            predicates[register as usize] = if value { FULL } else { 0 };
        }
        for &(register, kind) in &program.specials {
            let values = std::array::from_fn(|lane| special(kind, lane as u32));
            match register {
                Data::Word(register) => words[register as usize] = values.map(|x| x as u32),
                Data::Long(register) => longs[register as usize] = values,
            }
        }
        Warp {
            index,
            own_block: special(Special::ClusterRank, 0) * BLOCK_BYTES,
            words,
            longs,
            predicates,
            carry: 0,
            pc: 0,
            active: FULL,
            merge_pc: u32::MAX,
            others: Vec::new(),
            copies: Vec::new(),
            commits: [0; 32],
            wgmmas: Vec::new(),
            wgmma_groups: 0,
            stores: Vec::new(),
            store_groups: [0; 32],
        }
    }

    /// Index of the instruction that is executed next, or was when the warp stopped at a fault.
    pub fn pc(&self) -> u32 {
        self.pc
    }

    #[inline(always)]
    pub fn predicate(&self, p: Predicate) -> u32 {
        self.predicates[p.index as usize] ^ if p.negated { FULL } else { 0 }
    }

    #[inline(always)]
    pub fn put_word(&mut self, d: Reg, values: &Words, mask: u32) {
        let place = &mut self.words[d as usize];
        if mask == FULL {
            *place = *values;
        } else {
            for i in 0..32 {
                place[i] = if mask >> i & 1 == 1 { values[i] } else { place[i] };
            }
        }
    }

    #[inline(always)]
    pub fn put_long(&mut self, d: Reg, values: &Longs, mask: u32) {
        let place = &mut self.longs[d as usize];
        if mask == FULL {
            *place = *values;
        } else {
            for i in 0..32 {
                place[i] = if mask >> i & 1 == 1 { values[i] } else { place[i] };
            }
        }
    }

    #[inline(always)]
    pub fn put_predicate(&mut self, d: Reg, values: u32, mask: u32) {
        let place = &mut self.predicates[d as usize];
        *place = *place & !mask | values & mask;
    }

    /// Values of a register of either file, zero-extended.
    pub fn data(&self, data: Data) -> Longs {
        match data {
            Data::Word(register) => self.words[register as usize].map(u64::from),
            Data::Long(register) => self.longs[register as usize],
        }
    }

    /// Writes the low bits of `values` to a register of either file.
    pub fn put_data(&mut self, d: Data, values: &Longs, mask: u32) {
        match d {
            Data::Word(register) => self.put_word(register, &values.map(|x| x as u32), mask),
            Data::Long(register) => self.put_long(register, values, mask),
        }
    }

    /// Chooses the group to run. False if there is none that can.
    fn reschedule(&mut self) -> bool {
        if self.active != 0 {
            self.others.push(Group { pc: self.pc, lanes: self.active, waiting: false });
            self.active = 0;
        }
        self.others.sort_by_key(|group| group.pc);
        self.others.dedup_by(|next, group| {
            let met = next.pc == group.pc;
            if met {
                group.lanes |= next.lanes;
                group.waiting = false;
            }
            met
        });
        let Some(at) = self.others.iter().position(|group| !group.waiting) else { return false };
        let group = self.others.remove(at);
        (self.pc, self.active) = (group.pc, group.lanes);
        self.merge_pc = self.others.get(at).map_or(u32::MAX, |ahead| ahead.pc);
        true
    }

    /// Another group's turn; a fault if those that are left all wait at collectives.
    fn switch(&mut self) -> Result<bool, LaneFault> {
        if self.reschedule() {
            return Ok(true);
        }
        match self.others.first() {
            None => Ok(false),
            Some(group) => {
                self.pc = group.pc;
                Err(Cause::Diverged { lanes: group.lanes }.into())
            }
        }
    }

    /// All lanes' value of an operand that must not differ between lanes.
    fn uniform(&self, register: Reg, operand: u32) -> Result<u32, LaneFault> {
        let values = &self.words[register as usize];
        if values.iter().any(|value| *value != values[0]) {
            return Err(Cause::CollectiveOperand { operand, rule: "the same in all lanes" }.into());
        }
        Ok(values[0])
    }

    fn whole_warp(&self, members: Reg, operand: u32) -> Result<(), LaneFault> {
        if self.words[members as usize] == [FULL; 32] {
            return Ok(());
        }
        Err(Cause::CollectiveOperand { operand, rule: "the mask of all 32 lanes" }.into())
    }

    /// Runs until a block barrier, the end, or `turn` instructions.
    ///
    /// # Errors
    /// What the instruction at [`Warp::pc`] did wrong.
    pub fn run(&mut self, env: &mut Environment, turn: u64) -> Result<Event, LaneFault> {
        let program = env.program;
        for _ in 0..turn {
            let instruction = &program.instructions[self.pc as usize];
            let mask = match instruction.guard {
                None => self.active,
                Some(guard) => self.active & self.predicate(guard),
            };
            if instruction.collective && mask != FULL && mask != 0 {
                if mask != self.active {
                    return Err(Cause::Diverged { lanes: mask }.into());
                }
                self.others.push(Group { pc: self.pc, lanes: self.active, waiting: true });
                self.active = 0;
                self.switch()?;
                continue;
            }
            env.stats.warp_instructions += 1;
            env.stats.thread_instructions += mask.count_ones() as u64;
            match &instruction.op {
                Op::Branch { target } => {
                    self.pc += 1;
                    if mask == self.active {
                        self.pc = *target;
                    } else if mask != 0 {
                        self.active &= !mask;
                        self.others.push(Group { pc: *target, lanes: mask, waiting: false });
                    }
                    if !self.others.is_empty() {
                        self.reschedule();
                    }
                    continue;
                }
                Op::BranchIndexed { index, targets } => {
                    let index = self.words[*index as usize];
                    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
                        let bad = Cause::BranchIndex { index: index[lane], targets: targets.len() as u32 };
                        let pc = *targets.get(index[lane] as usize).ok_or(bad.on(lane))?;
                        self.others.push(Group { pc, lanes: 1 << lane, waiting: false });
                    }
                    self.active &= !mask;
                    self.pc += 1;
                    self.reschedule();
                    continue;
                }
                Op::Exit => {
                    self.active &= !mask;
                    self.pc += 1;
                    if self.active == 0 && !self.switch()? {
                        return Ok(Event::Exited);
                    }
                    continue;
                }
                Op::BlockBarrier { id, threads, wait } if mask == FULL => {
                    let id = self.uniform(*id, 0)?;
                    let threads = threads.map(|threads| self.uniform(threads, 1)).transpose()?;
                    self.pc += 1;
                    return Ok(Event::Barrier { id, threads, wait: *wait });
                }
                Op::ClusterBarrier if mask == FULL => {
                    self.pc += 1;
                    return Ok(Event::ClusterBarrier);
                }
                Op::Yield => {
                    self.pc += 1;
                    if self.pc >= self.merge_pc {
                        self.reschedule();
                    }
                    return Ok(Event::Paused);
                }
                Op::Hopper(op) if mask != 0 => {
                    let goes_on = self.hopper(env, op, mask)?;
                    if !goes_on {
                        self.pc += 1;
                        if self.pc >= self.merge_pc {
                            self.reschedule();
                        }
                        return Ok(Event::Paused);
                    }
                    if let Hopper::WgmmaWait { .. } = **op {
                        self.pc += 1;
                        return Ok(Event::Warpgroup);
                    }
                }
                op if mask != 0 => self.execute(env, op, mask)?,
                _ => {}
            }
            self.pc += 1;
            if self.pc >= self.merge_pc {
                self.reschedule();
            }
        }
        Ok(Event::Paused)
    }

    /// Executes an instruction that does not change control flow.
    #[inline(always)]
    fn execute(&mut self, env: &mut Environment, op: &Op, mask: u32) -> Result<(), LaneFault> {
        let (mut word, mut long): (Words, Longs) = ([0; 32], [0; 32]);
        macro_rules! w {
            ($r:expr) => {
                &self.words[*$r as usize]
            };
        }
        macro_rules! l {
            ($r:expr) => {
                &self.longs[*$r as usize]
            };
        }
        match op {
            Op::Word1 { f, d, a } => {
                f(w!(a), &mut word);
                self.put_word(*d, &word, mask);
            }
            Op::Word2 { f, d, a, b } => {
                f(w!(a), w!(b), &mut word);
                self.put_word(*d, &word, mask);
            }
            Op::Word3 { f, d, a, b, c } => {
                f(w!(a), w!(b), w!(c), &mut word);
                self.put_word(*d, &word, mask);
            }
            Op::Word4 { f, d, s } => {
                f([w!(&s[0]), w!(&s[1]), w!(&s[2]), w!(&s[3])], &mut word);
                self.put_word(*d, &word, mask);
            }
            Op::WordOfLong { f, d, a } => {
                f(l!(a), &mut word);
                self.put_word(*d, &word, mask);
            }
            Op::Long1 { f, d, a } => {
                f(l!(a), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::Long2 { f, d, a, b } => {
                f(l!(a), l!(b), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::Long3 { f, d, a, b, c } => {
                f(l!(a), l!(b), l!(c), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::LongOfWord { f, d, a } => {
                f(w!(a), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::LongOfWords { f, d, a, b } => {
                f(w!(a), w!(b), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::LongOfWordsLong { f, d, a, b, c } => {
                f(w!(a), w!(b), l!(c), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::LongShift { f, d, a, b } => {
                f(l!(a), w!(b), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::LongField { f, d, a, b, c } => {
                f(l!(a), w!(b), w!(c), &mut long);
                self.put_long(*d, &long, mask);
            }
            Op::CompareWords { f, d, a, b, with } => {
                let mut result = f(w!(a), w!(b));
                if let Some((logic, p)) = with {
                    result = logic.apply(result, self.predicate(*p));
                }
                self.put_predicate(*d, result, mask);
            }
            Op::CompareLongs { f, d, a, b, with } => {
                let mut result = f(l!(a), l!(b));
                if let Some((logic, p)) = with {
                    result = logic.apply(result, self.predicate(*p));
                }
                self.put_predicate(*d, result, mask);
            }
            Op::SelectWord { d, a, b, p } => {
                let (p, a, b) = (self.predicate(*p), w!(a), w!(b));
                for i in 0..32 {
                    word[i] = if p >> i & 1 == 1 { a[i] } else { b[i] };
                }
                self.put_word(*d, &word, mask);
            }
            Op::SelectLong { d, a, b, p } => {
                let (p, a, b) = (self.predicate(*p), l!(a), l!(b));
                for i in 0..32 {
                    long[i] = if p >> i & 1 == 1 { a[i] } else { b[i] };
                }
                self.put_long(*d, &long, mask);
            }
            Op::Predicates { logic, d, a, b } => {
                let result = logic.apply(self.predicate(*a), self.predicate(*b));
                self.put_predicate(*d, result, mask);
            }
            Op::Convert { conversion, d, width, a } => {
                let keep = u64::MAX >> (64 - width);
                let values = self.data(*a).map(|x| conversion.apply(x) & keep);
                self.put_data(*d, &values, mask);
            }
            Op::Carry(carry) => self.add_with_carry(carry, mask),
            Op::Clock { d } => self.put_data(*d, &[env.stats.warp_instructions; 32], mask),
            Op::Access(access) if access.0 => self.store(env, &access.1, mask)?,
            Op::Access(access) => self.load(env, &access.1, mask)?,
            Op::Atomic(atomic) => self.atomic(env, atomic, mask)?,
            Op::AsyncCopy(copy) => self.copy(env, copy, mask)?,
            Op::AsyncCommit => self.commit(mask),
            Op::AsyncWait { pending } => self.wait(env, *pending, mask)?,
            Op::AsyncWaitAll => {
                self.commit(mask);
                self.wait(env, 0, mask)?;
            }
            Op::Fence => fence(Ordering::SeqCst),
            Op::FenceProxy => env.shared.fence_proxy(self.index),
            Op::Matrix(matrix) => self.matrix(env, matrix)?,
            Op::MoveMatrix { d, a } => self.move_matrix(*d, *a),
            Op::Mma(mma) => {
                env.stats.mma_instructions += 1;
                self.mma(mma);
            }
            Op::Shuffle(shuffle) => self.shuffle(shuffle)?,
            Op::Reduce { f, d, a, members } => {
                self.whole_warp(*members, 2)?;
                let value = f(w!(a));
                self.put_word(*d, &[value; 32], mask);
            }
            Op::Vote { mode, d, a, members } => {
                self.whole_warp(*members, 2)?;
                let votes = self.predicate(*a);
                let result = match mode {
                    VoteMode::All => votes == FULL,
                    VoteMode::Any => votes != 0,
                    VoteMode::Uniform => votes == FULL || votes == 0,
                };
                self.put_predicate(*d, if result { FULL } else { 0 }, mask);
            }
            Op::Ballot { d, a, members } => {
                self.whole_warp(*members, 2)?;
                self.put_word(*d, &[self.predicate(*a); 32], mask);
            }
            Op::ActiveMask { d } => self.put_word(*d, &[FULL; 32], mask),
            Op::WarpBarrier { members } => {
                self.whole_warp(*members, 0)?;
                env.shared.synchronise_lanes(self.index);
            }
            Op::Trap => return Err(Cause::Trap.on(mask.trailing_zeros() as usize)),
            Op::Nop => {}
            // Control flow, which `run` executes.
            Op::Branch { .. }
            | Op::BranchIndexed { .. }
            | Op::Exit
            | Op::BlockBarrier { .. }
            | Op::ClusterBarrier
            | Op::Yield
            | Op::Hopper(_) => {}
        }
        Ok(())
    }

    fn add_with_carry(&mut self, op: &Carry, mask: u32) {
        let (a, b) = (self.data(op.a), self.data(op.b));
        let bits = if matches!(op.d, Data::Long(_)) { 64 } else { 32 };
        let mut carries = 0;
        let values: Longs = std::array::from_fn(|lane| {
            let carry = (op.carry_in && self.carry >> lane & 1 == 1) as i128;
            let (a, b) = (a[lane] as i128, b[lane] as i128);
            // A borrow is a carry out of subtraction.
            let exact = if op.subtract { a - b - carry } else { a + b + carry };
            carries |= ((exact >> bits != 0) as u32) << lane;
            exact as u64
        });
        if op.carry_out {
            self.carry = self.carry & !mask | carries & mask;
        }
        self.put_data(op.d, &values, mask);
    }

    fn shuffle(&mut self, op: &Shuffle) -> Result<(), LaneFault> {
        self.whole_warp(op.members, 4)?;
        let (a, b, c) = (&self.words[op.a as usize], &self.words[op.b as usize], &self.words[op.c as usize]);
        let mut inside = 0;
        let values = std::array::from_fn(|lane| {
            let (lane, b, clamp, segment) =
                (lane as i32, (b[lane] & 31) as i32, (c[lane] & 31) as i32, (c[lane] >> 8 & 31) as i32);
            let last = lane & segment | clamp & !segment;
            let (source, valid) = match op.mode {
                ShuffleMode::Up => (lane - b, lane - b >= last),
                ShuffleMode::Down => (lane + b, lane + b <= last),
                ShuffleMode::Butterfly => (lane ^ b, lane ^ b <= last),
                ShuffleMode::Index => {
                    let source = lane & segment | b & !segment;
                    (source, source <= last)
                }
            };
            inside |= (valid as u32) << lane;
            a[if valid { source } else { lane } as usize]
        });
        self.put_word(op.d, &values, FULL);
        if let Some(p) = op.in_range {
            self.put_predicate(p, inside, FULL);
        }
        Ok(())
    }
}
