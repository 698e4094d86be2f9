//! A bank: transfers between accounts, and an audit that no money was created or lost.

use tonic::{Code, Status};

use crate::transactions::{timed, Gateways, Outcome, Transaction};
use crate::wire::master_service_client::MasterServiceClient;
use crate::wire::{as_integer, detail, error_detail::Cause, integer, CreateTableRequest};

const TABLE: &str = "rust-accounts";
const BALANCE: &str = "balance";
pub const OPENING_BALANCE: i64 = 100;

/// The name of an account, which is its row key.
pub fn account(number: u64) -> String {
    format!("account-{number:03}")
}

/// Creates the table. A gateway forwards this call to a master. It succeeds if the table exists, so
/// it may be repeated.
pub async fn create_table(gateways: &Gateways) -> Result<(), Status> {
    let request = CreateTableRequest {
        name: TABLE.into(),
        splits: vec![account(5).into_bytes()],
        exist_ok: true,
        ..Default::default()
    };
    gateways
        .anywhere(|channel| {
            let request = timed(request.clone());
            async move {
                MasterServiceClient::new(channel)
                    .create_table(request)
                    .await
            }
        })
        .await?;
    Ok(())
}

/// Opens all accounts or none, and only if there are none. So any number of clients may run it.
pub async fn open_accounts(gateways: &Gateways, accounts: u64) -> Result<(), Status> {
    let names: Vec<String> = (0..accounts).map(account).collect();
    loop {
        let mut tx = gateways.begin().await?;
        let found = tx.get(TABLE, &names, BALANCE).await?;
        for (name, balance) in names.iter().zip(found) {
            if balance.is_none() {
                tx.put(TABLE, name, BALANCE, integer(OPENING_BALANCE));
            }
        }
        if let Outcome::Committed(_) = tx.commit().await? {
            return Ok(());
        }
    }
}

/// What one transfer needed.
#[derive(Default)]
pub struct Effort {
    pub conflicts: u64,
    pub repeats: u64,
}

/// Moves money if there is enough. After a conflict, it is retried on a fresh snapshot.
///
/// With `lose_answer`, it acts as if the response to the commit was lost, and repeats the commit.
pub async fn transfer(
    gateways: &Gateways,
    source: &str,
    target: &str,
    amount: i64,
    lose_answer: bool,
) -> Result<Effort, Status> {
    let mut effort = Effort::default();
    loop {
        let mut tx = gateways.begin().await?;
        let rows = [source.to_owned(), target.to_owned()];
        let mut balances = Vec::new();
        for value in tx.get(TABLE, &rows, BALANCE).await? {
            let value = value.ok_or_else(|| Status::not_found("there is no such account"))?;
            balances.push(as_integer(&value)?);
        }
        if balances[0] < amount {
            return Ok(effort);
        }
        tx.put(TABLE, source, BALANCE, integer(balances[0] - amount));
        tx.put(TABLE, target, BALANCE, integer(balances[1] + amount));
        let outcome = if lose_answer {
            commit_twice(gateways, &tx).await?
        } else {
            tx.commit().await?
        };
        if lose_answer {
            effort.repeats += 1;
        }
        match outcome {
            Outcome::Committed(_) => return Ok(effort),
            Outcome::Aborted(status) => {
                explain(&status);
                effort.conflicts += 1;
            }
        }
    }
}

/// Commits at two gateways, one after the other, and checks that both give the same answer.
async fn commit_twice(gateways: &Gateways, tx: &Transaction<'_>) -> Result<Outcome, Status> {
    let lost = tx.commit().await?;
    let repeated = tx.commit_from(gateways.turn() + 1).await?;
    let same = match (&lost, &repeated) {
        (Outcome::Committed(one), Outcome::Committed(other)) => one == other,
        (Outcome::Aborted(_), Outcome::Aborted(_)) => true,
        _ => false,
    };
    if !same {
        return Err(Status::data_loss(format!(
            "first {lost:?}, then {repeated:?}"
        )));
    }
    Ok(repeated)
}

/// Prints which transaction was first, if `EXPLAIN` is set.
fn explain(status: &Status) {
    if std::env::var_os("EXPLAIN").is_none() {
        return;
    }
    if let Some(Cause::Conflict(met)) = detail(status).and_then(|told| told.cause) {
        let row = met
            .cell
            .map(|cell| String::from_utf8_lossy(&cell.row).into_owned());
        eprintln!(
            "transaction {} met {} at {}",
            met.start_timestamp,
            met.other_start_timestamp,
            row.unwrap_or_default()
        );
    }
}

/// The sum of all accounts at one snapshot, however much is transferred meanwhile.
pub async fn total(gateways: &Gateways) -> Result<(usize, i64), Status> {
    let tx = gateways.begin().await?;
    let rows = tx.scan(TABLE, BALANCE).await?;
    let mut sum = 0;
    for (_, value) in &rows {
        sum += as_integer(value)?;
    }
    Ok((rows.len(), sum))
}

/// Commits to a table that does not exist: an error, and nothing is written.
pub async fn is_refused_without_a_table(gateways: &Gateways) -> Result<bool, Status> {
    let mut tx = gateways.begin().await?;
    tx.put("no-such-table", "row", BALANCE, integer(1));
    match tx.commit().await {
        Err(status) => Ok(status.code() == Code::NotFound),
        Ok(_) => Ok(false),
    }
}
