/* Questions as people type them are found: words that are in every question are left out, else "how" finds "however",
   and endings too, as the search takes what is left for the beginning of a word. */
(() => {
  const common = new Set(
    ("a about after all also am an and any are as at be been but by can can't cannot could did do does doesn't don't for from get give " +
      "had has have how i i'm if in into instead is it its just let like make me much must my need no not of off on only or " +
      "our put should so some than that the their them then there these they this to too up us use used using want was we what " +
      "when where which while who why will with without would you your boltcutter").split(" "),
  );
  const send = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message?.type === 2) {
      const words = message.data.split(/\s+/).filter(Boolean);
      const telling = words.filter((word) => !common.has(word.toLowerCase().replace(/[?!,.:]+\*?$/, "")));
      const data = (telling.length ? telling : words).map((word) => word.replace(/(?<=\w{3})(?:ings?|ed|es?|s)?[?!,.]*(?=\*?$)/, ""));
      message = { ...message, data: data.join(" ") };
    }
    return send.call(this, message, ...rest);
  };
})();
