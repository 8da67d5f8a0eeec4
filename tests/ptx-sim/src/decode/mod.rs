//! From statements to operations. A modifier that nobody takes is an error: nothing is ignored silently but what says so.

mod arithmetic;
mod collective;
mod hopper;
mod logic;
mod memory;
mod movement;

use crate::Error;
use crate::body::{Body, Operand, Statement};
use crate::op::{Longs, Op, Words};

/// Applies `f` in all lanes.
#[inline(always)]
fn each1<A: Copy, D>(a: &[A; 32], d: &mut [D; 32], f: impl Fn(A) -> D) {
    for i in 0..32 {
        d[i] = f(a[i]);
    }
}

/// Applies `f` in all lanes.
#[inline(always)]
fn each2<A: Copy, B: Copy, D>(a: &[A; 32], b: &[B; 32], d: &mut [D; 32], f: impl Fn(A, B) -> D) {
    for i in 0..32 {
        d[i] = f(a[i], b[i]);
    }
}

/// Applies `f` in all lanes.
#[inline(always)]
fn each3<A: Copy, B: Copy, C: Copy, D>(
    a: &[A; 32],
    b: &[B; 32],
    c: &[C; 32],
    d: &mut [D; 32],
    f: impl Fn(A, B, C) -> D,
) {
    for i in 0..32 {
        d[i] = f(a[i], b[i], c[i]);
    }
}

/// A function over all lanes made of a function of one lane, as a plain function pointer.
macro_rules! lanes {
    ($f:expr; $($x:ident: $t:ty),+ => $d:ty; $each:ident) => {{
        fn all($($x: &$t,)+ d: &mut $d) {
            $each($($x,)+ d, $f)
        }
        all
    }};
}
macro_rules! word1 { ($f:expr) => { lanes!($f; a: Words => Words; each1) }; }
macro_rules! word2 { ($f:expr) => { lanes!($f; a: Words, b: Words => Words; each2) }; }
macro_rules! word3 { ($f:expr) => { lanes!($f; a: Words, b: Words, c: Words => Words; each3) }; }
macro_rules! long1 { ($f:expr) => { lanes!($f; a: Longs => Longs; each1) }; }
macro_rules! long2 { ($f:expr) => { lanes!($f; a: Longs, b: Longs => Longs; each2) }; }
macro_rules! long3 { ($f:expr) => { lanes!($f; a: Longs, b: Longs, c: Longs => Longs; each3) }; }
pub(crate) use {lanes, long1, long2, long3, word1, word2, word3};

/// Decodes a statement into the body's program.
///
/// # Errors
/// [`Error::Parse`] with the statement's line.
pub(crate) fn statement<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    match st.name {
        "add" | "addc" | "sub" | "subc" | "mul" | "mad" | "fma" | "div" | "rem" | "abs" | "neg" | "min" | "max"
        | "sqrt" | "rsqrt" | "rcp" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "sad" => {
            arithmetic::decode(body, st)
        }
        "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "bfe" | "bfi" | "bfind" | "popc" | "clz"
        | "brev" | "prmt" | "lop3" | "setp" | "selp" | "slct" | "testp" => logic::decode(body, st),
        "mov" | "cvt" | "cvta" | "isspacep" => movement::decode(body, st),
        "mapa" | "mbarrier" | "wgmma" | "setmaxnreg" | "griddepcontrol" => hopper::decode(body, st),
        "cp" if st.modifiers.contains(&"bulk") => hopper::decode(body, st),
        "fence" if matches!(st.modifiers.first(), Some(&("proxy" | "mbarrier_init"))) => hopper::fence(body, st),
        "ld" | "st" | "ldu" | "atom" | "red" | "cp" | "membar" | "fence" => memory::decode(body, st),
        "bar" | "barrier" | "shfl" | "redux" | "vote" | "activemask" | "ldmatrix" | "stmatrix" | "movmatrix"
        | "mma" => collective::decode(body, st),
        "bra" | "brx" => branch(body, st),
        "ret" | "exit" => {
            st.take("uni");
            done(body, &st, 0)?;
            body.emit(Op::Exit);
            Ok(())
        }
        "trap" => {
            done(body, &st, 0)?;
            body.emit(Op::Trap);
            Ok(())
        }
        "nanosleep" => {
            body.emit(Op::Yield);
            Ok(())
        }
        // Hints.
        "prefetch" | "prefetchu" | "applypriority" | "discard" | "pmevent" => {
            body.emit(Op::Nop);
            Ok(())
        }
        "createpolicy" => {
            // Only a cache hint's value: it is never looked at.
            let Some(destination) = st.operands.first() else {
                return Err(body.error("createpolicy without a destination"));
            };
            let d = body.long_destination(destination)?;
            let a = body.long(&Operand::Name { text: "0", prefixed: false })?;
            body.emit(Op::Long1 { f: long1!(|a| a), d, a });
            Ok(())
        }
        _ => Err(unknown(body, &st)),
    }
}

fn branch<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    st.take("uni");
    let indexed = st.name == "brx" && st.take("idx");
    if indexed {
        done(body, &st, 2)?;
        let index = body.word(&st.operands[0])?;
        let Operand::Name { text, .. } = st.operands[1] else { return Err(unknown(body, &st)) };
        body.emit_branch(Op::BranchIndexed { index, targets: Box::default() }, text);
        return Ok(());
    }
    done(body, &st, 1)?;
    match st.operands[0] {
        Operand::Name { text, prefixed: false } if st.name == "bra" => {
            body.emit_branch(Op::Branch { target: 0 }, text);
            Ok(())
        }
        _ => Err(unknown(body, &st)),
    }
}

/// The error of an instruction that is not simulated.
fn unknown(body: &Body<'_, '_>, st: &Statement<'_>) -> Error {
    let modifiers: Vec<_> = st.modifiers.iter().map(|m| format!(".{m}")).collect();
    body.error(format!("instruction not simulated: `{}` with {}", st.name, modifiers.join("")))
}

/// Checks that all modifiers are understood and that there are `count` operands.
fn done(body: &Body<'_, '_>, st: &Statement<'_>, count: usize) -> Result<(), Error> {
    if !st.modifiers.is_empty() {
        return Err(unknown(body, st));
    }
    if st.operands.len() != count {
        return Err(body.error(format!("`{}` takes {count} operands here, found {}", st.name, st.operands.len())));
    }
    Ok(())
}

/// Helpers that check a statement, take its operands by shape, and emit the operation.
impl<'a> Body<'a, '_> {
    fn emit_word1(&mut self, st: &Statement<'a>, f: fn(&Words, &mut Words)) -> Result<(), Error> {
        done(self, st, 2)?;
        let (d, a) = (self.word_destination(&st.operands[0])?, self.word(&st.operands[1])?);
        self.emit(Op::Word1 { f, d, a });
        Ok(())
    }

    fn emit_word2(&mut self, st: &Statement<'a>, f: fn(&Words, &Words, &mut Words)) -> Result<(), Error> {
        done(self, st, 3)?;
        let (d, a) = (self.word_destination(&st.operands[0])?, self.word(&st.operands[1])?);
        let b = self.word(&st.operands[2])?;
        self.emit(Op::Word2 { f, d, a, b });
        Ok(())
    }

    fn emit_word3(&mut self, st: &Statement<'a>, f: fn(&Words, &Words, &Words, &mut Words)) -> Result<(), Error> {
        done(self, st, 4)?;
        let (d, a) = (self.word_destination(&st.operands[0])?, self.word(&st.operands[1])?);
        let (b, c) = (self.word(&st.operands[2])?, self.word(&st.operands[3])?);
        self.emit(Op::Word3 { f, d, a, b, c });
        Ok(())
    }

    fn emit_word4(&mut self, st: &Statement<'a>, f: fn([&Words; 4], &mut Words)) -> Result<(), Error> {
        done(self, st, 5)?;
        let d = self.word_destination(&st.operands[0])?;
        let mut s = [0; 4];
        for (s, operand) in s.iter_mut().zip(&st.operands[1..]) {
            *s = self.word(operand)?;
        }
        self.emit(Op::Word4 { f, d, s });
        Ok(())
    }

    fn emit_long1(&mut self, st: &Statement<'a>, f: fn(&Longs, &mut Longs)) -> Result<(), Error> {
        done(self, st, 2)?;
        let (d, a) = (self.long_destination(&st.operands[0])?, self.long(&st.operands[1])?);
        self.emit(Op::Long1 { f, d, a });
        Ok(())
    }

    fn emit_long2(&mut self, st: &Statement<'a>, f: fn(&Longs, &Longs, &mut Longs)) -> Result<(), Error> {
        done(self, st, 3)?;
        let (d, a) = (self.long_destination(&st.operands[0])?, self.long(&st.operands[1])?);
        let b = self.long(&st.operands[2])?;
        self.emit(Op::Long2 { f, d, a, b });
        Ok(())
    }

    fn emit_long3(&mut self, st: &Statement<'a>, f: fn(&Longs, &Longs, &Longs, &mut Longs)) -> Result<(), Error> {
        done(self, st, 4)?;
        let (d, a) = (self.long_destination(&st.operands[0])?, self.long(&st.operands[1])?);
        let (b, c) = (self.long(&st.operands[2])?, self.long(&st.operands[3])?);
        self.emit(Op::Long3 { f, d, a, b, c });
        Ok(())
    }
}
