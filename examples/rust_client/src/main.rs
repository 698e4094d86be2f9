//! percolator-bank ADDRESS[,ADDRESS…] [TRANSFERS]
//!
//! Transfers money between accounts with several concurrent tellers through the given gateways, and
//! audits it. Every tenth commit is sent twice, to two gateways, as if the response had been lost.

mod bank;
mod transactions;
mod wire;

use std::process::ExitCode;

use tokio::task::LocalSet;
use tonic::Status;
use transactions::Gateways;

const ACCOUNTS: u64 = 10;
const TELLERS: u64 = 4;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(addresses) = arguments.first() else {
        eprintln!("usage: percolator-bank ADDRESS[,ADDRESS...] [TRANSFERS]");
        return ExitCode::from(2);
    };
    let transfers = arguments.get(1).map_or(Ok(200), |text| text.parse());
    let Ok(transfers) = transfers else {
        eprintln!("TRANSFERS: expected a number, found {:?}", arguments[1]);
        return ExitCode::from(2);
    };
    let addresses: Vec<String> = addresses.split(',').map(str::to_owned).collect();
    match run(&addresses, transfers).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

async fn run(addresses: &[String], transfers: u64) -> Result<(), Box<dyn std::error::Error>> {
    let gateways: &'static Gateways = Box::leak(Box::new(Gateways::new(addresses)?));
    bank::create_table(gateways).await?;
    bank::open_accounts(gateways, ACCOUNTS).await?;
    let tellers = LocalSet::new();
    let working: Vec<_> = (0..TELLERS)
        .map(|teller| tellers.spawn_local(work(gateways, teller, transfers / TELLERS)))
        .collect();
    tellers.await;
    let (mut conflicts, mut repeats) = (0, 0);
    for one in working {
        let effort = one.await??;
        conflicts += effort.conflicts;
        repeats += effort.repeats;
    }
    if !bank::is_refused_without_a_table(gateways).await? {
        return Err("a table that does not exist was written to".into());
    }
    let (accounts, total) = bank::total(gateways).await?;
    println!("{transfers} transfers, {conflicts} conflicts, {repeats} commits sent twice");
    println!("{total} in {accounts} accounts together");
    if total != bank::OPENING_BALANCE * i64::try_from(accounts)? {
        return Err("money was made or lost".into());
    }
    Ok(())
}

/// One teller, who makes one transfer after another.
async fn work(gateways: &Gateways, teller: u64, transfers: u64) -> Result<bank::Effort, Status> {
    let mut done = bank::Effort::default();
    let mut chance = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(teller + 1);
    for number in 0..transfers {
        // A xorshift generator is good enough here.
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        let source = chance % ACCOUNTS;
        let target = (source + 1 + chance / 97 % (ACCOUNTS - 1)) % ACCOUNTS;
        let amount = 1 + i64::try_from(chance / 1_009 % 10).unwrap_or(0);
        let effort = bank::transfer(
            gateways,
            &bank::account(source),
            &bank::account(target),
            amount,
            number % 10 == 0,
        )
        .await?;
        done.conflicts += effort.conflicts;
        done.repeats += effort.repeats;
    }
    Ok(done)
}
